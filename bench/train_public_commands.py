"""Train public Megatron-LM commands on the CPU, as they are and with three flags more.

    python -m bench.train_public_commands --out runs/public_scripts
    python -m bench.train_public_commands --out runs/two --only aws-gpt3 rocm-llama3

Each command is one of the collection of bench/public_commands.py, shrunk: its sizes, data, folders
and processes are replaced, and listed; all else stays as its script wrote it. It trains on Python's
language reference, homogeneous and then with --hetero-pipeline, --hetero-vendors nvidia amd and
--hetero-pipeline-sizes 1 1, and losses, gradient norms and final weights are compared. A script of
one pipeline stage becomes one of two, and is compared with two homogeneous stages as well: to these
all must be equal, bit for bit. One machine plays both vendors, which the results call simulated.
In fp8 these have two types, and losses are equal within its rounding; bit for bit must be a fourth
run, whose vendors have one type.
The folder holds results.md and results.json, written anew after every command, and each run's log,
metrics and report. Exit code 1 where a command does not train or is not equal.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script()

from bench.public_training.chosen import CHOSEN, Chosen
from bench.public_training.public_results import Row, write_results
from bench.public_training.shrinking import shrink
from bench.public_training.texts import build_text
from bench.public_training.trained_commands import train_all
from bench.real_text.text_sources import language_reference
from hetero.errors import HeteroError
from hetero.tools import tool_command_line


def main(argv: Sequence[str] | None = None) -> int:
    parser = tool_command_line.Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where results go")
    names = [one.short for one in CHOSEN]
    parser.add_argument(
        *("--only",),
        nargs="+",
        choices=names,
        default=names,
        metavar="NAME",
        help=f"some of {', '.join(names)}",
    )
    args = parser.parse_args(argv)
    chosen = [one for one in CHOSEN if one.short in args.only]
    return tool_command_line.run(
        lambda: train_chosen(chosen, tool_command_line.make_results_folder(args.out))
    )


def train_chosen(chosen: Sequence[Chosen], out: Path) -> str:
    """Train every pair and write what came of them. Raises HeteroError where one is not right."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="public-text-") as folder:
        text = Path(folder)
        for kind in dict.fromkeys(shrink(one.command).tokenizer for one in chosen):
            build_text(kind, language_reference(), text)
        for one in chosen:
            rows.append(_train(one, text, out))
            print(rows[-1].summary, flush=True)
            write_results(rows, out)
    wrong = [row.chosen.short for row in rows if not row.is_right]
    if wrong:
        raise HeteroError(
            f"{len(wrong)} of {len(rows)} are not right: {', '.join(wrong)}; {out}/results.md "
            "says why, the logs beside it say more"
        )
    return f"written: results.md and results.json in {out}"


def _train(one: Chosen, text: Path, out: Path) -> Row:
    shrunk = shrink(one.command)
    with tempfile.TemporaryDirectory(prefix="public-run-") as work:
        # Checkpoints of an earlier run would be loaded.
        try:
            runs = train_all(shrunk, name=one.short, text=text, work=Path(work), out=out)
        except HeteroError as error:
            return Row(one, shrunk, problem=str(error).splitlines()[0])
    return Row(one, shrunk, runs)


if __name__ == "__main__":
    sys.exit(main())
