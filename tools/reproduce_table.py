"""Run the rows of the published table on the GPUs of this machine, side by side.

    python tools/reproduce_table.py --model llama3_8b --nproc 2 --out runs/table
    python tools/reproduce_table.py --model qwen2_7b --nproc 2 --rows homogeneous device-direct \\
        --rounds 2 --iterations 5 --warmup 1 --out runs/table -- --attention-backend flash

Every row is a run of pretrain_gpt.py on the same model, data and split, and differs from the others
in what carries the tensors between the two stages; what follows `--` goes to all of them. One
machine plays both vendors in all rows but the homogeneous one, which the results call simulated.
Without --data-path the text is Python's language reference. The folder holds table.json, table.md
and table.png, written anew after every row, and each row's log, metrics and report. docs/metrics.md
says what each figure is.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tools.tool_command_line import begin_script

    begin_script()

import torch

from hetero.errors import HeteroError
from hetero.words import counted
from tools import tool_command_line
from tools.real_text.data_set import NAME as TEXT_NAME
from tools.real_text.data_set import build_real_text
from tools.reports.page import write_whole
from tools.reproduction import table, table_picture
from tools.reproduction.measurement import Attempt, as_mapping, summarise
from tools.reproduction.settings import SOURCE, SOURCE_SETTING, VENDORS
from tools.reproduction.table_options import parse_options
from tools.reproduction.table_rows import Options, attempt, parsed_row, row_flags, run_order

TUNING_VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "HSA_",
    "NCCL_",
    "OMP_NUM_THREADS",
    "PYTORCH_",
    "RCCL_",
    "TORCH_NCCL_",
)
"""How those begin that move a figure; the results say what they were."""


def write_results(options: Options, attempts: Sequence[Attempt], command: Sequence[str]) -> str:
    """Write the three files anew. Returns the text of table.md."""
    results = summarise(attempts, options.setting)
    lines = table.notes(results, attempts, warmup=options.warmup, iterations=options.iterations)
    machine = _machine(options, attempts)
    record = {
        "machine": machine,
        "model": options.setting.name,
        "layers": options.layers,
        "vendors_by_stage": VENDORS,
        "data": list(options.data_path) or TEXT_NAME,
        "source_of_published": f"{SOURCE}: {SOURCE_SETTING}",
        "notes": lines,
        "is_complete": len(attempts) == options.rounds * len(options.rows),
        "command": list(command),
        "flags": {row: row_flags(options, row, data=["<built-in text>"]) for row in options.rows},
        **as_mapping(attempts, results),
    }
    title = f"{options.setting.name} on {machine['summary']}"
    text = f"{title}\n\n{table.render(results)}\n\n" + "".join(f"- {line}\n" for line in lines)
    write_whole(options.out / "table.json", json.dumps(record, indent=1) + "\n")
    write_whole(options.out / "table.md", text)
    (options.out / "table.png").write_bytes(
        table_picture.draw(results, title=title, published_label=f"published: {SOURCE_SETTING}")
    )
    return text


def _machine(options: Options, attempts: Sequence[Attempt]) -> dict[str, Any]:
    measured = [a.measurement for a in attempts if a.measurement is not None]
    device = measured[0].device if measured else "unknown devices"
    simulated = ", vendors simulated" if any(m.simulated for m in measured) else ""
    args = parsed_row(options, options.rows[0])
    shape = f"TP1 PP{len(VENDORS)} DP{options.nproc // len(VENDORS)}"
    return {
        "summary": f"{options.nproc} x {device} of one machine, {shape}, sequence "
        f"{args.seq_length}, micro-batch {args.micro_batch_size}, global batch "
        f"{args.global_batch_size}{simulated}",
        "device": device,
        "torch": str(torch.__version__),
        "megatron_core": metadata.version("megatron-core"),
        "cores": len(os.sched_getaffinity(0)),
        "environment": {
            name: value for name, value in os.environ.items() if name.startswith(TUNING_VARIABLES)
        },
    }


@contextmanager
def data_flags(options: Options) -> Iterator[list[str]]:
    """Flags of the built-in text, which lasts as long as the rows run. None for the user's data."""
    if options.data_path:
        yield []
        return
    with tempfile.TemporaryDirectory(dir=options.out, prefix="data-") as folder:
        yield build_real_text(Path(folder)).flags


def reproduce(argv: Sequence[str]) -> str:
    """Run all rows. Returns the line for the end."""
    options = parse_options(argv, description=(__doc__ or "").splitlines()[0])
    options.out.mkdir(parents=True, exist_ok=True)
    attempts: list[Attempt] = []
    text = ""
    try:
        with data_flags(options) as data:
            for round_number, row in run_order(options):
                print(f"round {round_number}: {row}", flush=True)
                attempts.append(attempt(options, row, round_number, data=data))
                last = attempts[-1]
                print(f"  {_outcome(last)} ({last.seconds:.0f} s)", flush=True)
                text = write_results(options, attempts, ("tools/reproduce_table.py", *argv))
    except KeyboardInterrupt:
        raise tool_command_line.Interrupted(
            f"interrupted after {len(attempts)} of "
            f"{counted(options.rounds * len(options.rows), 'run')}; what "
            f"those measured is in {options.out}"
        ) from None
    print(f"\n{text}")
    failed = sum(a.problem is not None for a in attempts)
    if failed:
        raise HeteroError(
            f"{failed} of {len(attempts)} runs have no result; {options.out}/table.md says why, "
            "the logs beside it say more"
        )
    return f"written: table.json, table.md and table.png in {options.out}"


def _outcome(attempt: Attempt) -> str:
    if attempt.measurement is None:
        return str(attempt.problem)
    values = sorted(attempt.measurement.tflops)
    return f"{values[len(values) // 2]:.4g} TFLOP/s per GPU"


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    return tool_command_line.run(lambda: reproduce(words))


if __name__ == "__main__":
    sys.exit(main())
