"""What each part of a boundary between unequal meshes is worth, on two hosts of one machine.

    sudo .venv/bin/python bench/mesh_ablation.py --out runs/ablation

Two network namespaces play the hosts, on two rails of 800 Mbit/s each; two ranks on either, on CPU.
Each row adds something to the row before it, as in H2's table. Writes ablation.json and prints the
table. Vendors are simulated and hosts emulated.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script()

from bench.overlap.phases import MEASURED, Phase, as_variable
from hetero.errors import UserError
from hetero.text import integer
from hetero.tools import tool_command_line
from tests.hosts.network import Host, Network, why_impossible
from tests.hosts.runs import Run, rendezvous_flags

INTERFACES = {"hosta": ("east0", "east1"), "hostb": ("enp1s0", "enp2s0")}
WARM_UP = 4
MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 512 "
    "--seq-length 256 --max-position-embeddings 256 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0 "
    "--attention-dropout 0 --global-batch-size 32 --lr 1e-3 --min-lr 1e-4 --log-interval 1 "
    "--eval-iters 0 --num-workers 0 --mock-data --tokenizer-type ByteLevelTokenizer "
    "--use-distributed-optimizer --hetero-pipeline --hetero-vendors amd nvidia "
    # Else a tensor-parallel size would pad it, which makes another model.
    "--hetero-pipeline-sizes 1 1 --micro-batch-size 4 --padded-vocab-size 512"
).split()
UNIFORM = "--hetero-tensor-sizes 1 1 --hetero-data-sizes 2 2".split()
OWN = "--hetero-tensor-sizes 2 1 --hetero-data-sizes 1 2".split()
OUR_LINK = "--hetero-transport tcp --hetero-tcp-connections 2".split()
INTERLEAVED = "--num-virtual-stages-per-pipeline-rank 2".split()


@dataclass(frozen=True)
class Row:
    name: str
    flags: list[str]
    receives_early: bool = False


ROWS = (
    Row("gloo over TCP, uniform", [*UNIFORM, "--hetero-transport", "gloo"]),
    Row("our link, uniform", [*UNIFORM, *OUR_LINK]),
    Row("+ own shapes, every byte once", [*OWN, *OUR_LINK]),
    Row("+ early receive", [*OWN, *OUR_LINK], receives_early=True),
    Row("+ interleaved", [*OWN, *OUR_LINK, *INTERLEAVED], receives_early=True),
)


def run_row(row: Row, hosts: list[Host], folder: Path, iterations: int) -> dict[str, object]:
    folder.mkdir()
    metrics, report = folder / "metrics.jsonl", folder / "report.json"
    phases = as_variable([Phase(None, row.receives_early, iterations)])
    environ = {"HETERO_VENDOR": "plan", MEASURED: str(folder / "wires")} | phases
    commands = [
        [
            *("-m", "hetero.run", *rendezvous_flags(2, node, hosts[0].address(), ranks=2)),
            *("bench/overlap/slowed_rank.py", *MODEL, *row.flags),
            *("--train-iters", str(iterations), "--hetero-nics", *host.interfaces),
            *("--metrics-file", str(metrics), "--hetero-report", str(report)),
        ]
        for node, host in enumerate(hosts)
    ]
    before = _sent(hosts)
    Run(hosts, commands, folder, environs=[environ] * 2).numbers()
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {
        "row": row.name,
        "tokens_per_s": median(one["tokens_per_s"] for one in rows[WARM_UP:]),
        "losses": [one["loss"] for one in rows],
        "boundary_bytes": json.loads(report.read_text())["boundary_bytes"],
        "bytes_on_the_rails": _sent(hosts) - before,
    }


def _sent(hosts: list[Host]) -> int:
    return sum(host.bytes_sent(rail) for host in hosts for rail in (0, 1))


def main(argv: Sequence[str] | None = None) -> int:
    parser = tool_command_line.Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for ablation.json")
    parser.add_argument(
        "--iterations",
        type=integer(WARM_UP + 1),
        default=12,
        help=f"iterations of each row; the first {WARM_UP} are not counted",
    )
    numbers = range(len(ROWS))
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        choices=numbers,
        default=numbers,
        help="rows of the table, from 0",
    )
    given = parser.parse_args(argv)
    return tool_command_line.run(lambda: measure(given.out, given.rows, given.iterations))


def measure(out: Path, rows: Sequence[int], iterations: int) -> str:
    """Run the rows, print them and write ablation.json after each."""
    if (reason := why_impossible()) is not None:
        raise UserError(f"no hosts can be played here: {reason}")
    tool_command_line.make_results_folder(out)
    found: list[dict[str, object]] = []
    print("| | tokens/s | of the first | over the boundary, MiB a step | on the rails |")
    print("|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as name, Network(Path(name), INTERFACES) as network:
        for number in rows:
            row = ROWS[number]
            folder = Path(name) / f"row {number}"
            found.append(run_row(row, network.hosts, folder, iterations))
            ratio = found[-1]["tokens_per_s"] / found[0]["tokens_per_s"]  # type: ignore[operator]
            boundary, wire = (
                int(str(found[-1][key])) / 2**20 / iterations
                for key in ("boundary_bytes", "bytes_on_the_rails")
            )
            print(
                f"| {row.name} | {found[-1]['tokens_per_s']:,.0f} | {ratio:.2f} "
                f"| {boundary:,.1f} | {wire:,.1f} |",
                flush=True,
            )
            (out / "ablation.json").write_text(json.dumps(found, indent=1) + "\n")
    return ""


if __name__ == "__main__":
    sys.exit(main())
