"""Tell a kernel's rounding from a bug: every operator of a layer on two devices, side by side.

    hetero compare-ops check --dtype bf16 --yaml-cfg llama3.1-8b \\
        --seq-length 1024                             # this GPU against float64 on its CPU
    hetero compare-ops run --out nvidia.dump ...    # on one machine
    hetero compare-ops run --out amd.dump ...       # the same on the other
    hetero compare-ops compare nvidia.dump amd.dump # anywhere
    hetero compare-ops case operator_cases/...      # what a run's --hetero-check-operators kept

Flags that are not its own are those of pretrain_gpt.py. Exit code 0: all operators agree within
rounding; 1: one does not; 2: the comparison could not be made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    # As a script, only this file's folder would be importable.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from hetero import cli

    sys.exit(cli.main(["compare-ops", *sys.argv[1:]]))

from hetero.text import counted, integer
from hetero.tools.tool_command_line import Parser, require_results_file, run
from megatron.hetero.import_core import import_megatron_core

if TYPE_CHECKING:
    from hetero.tools.operators.comparison import Comparison
    from hetero.tools.operators.dump import Dump

_SAMPLE = 65536


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    diverged: list[bool] = []

    def work() -> str:
        text, passed = _COMMANDS[options.command](options)
        diverged.append(not passed)
        return text

    return run(work) or int(any(diverged))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser((__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=_Command
    )
    runs = commands.add_parser("run", help="run the operators here and write what they computed")
    runs.add_argument("--out", type=Path, required=True, metavar="FILE", help="dump to write")
    checks = commands.add_parser("check", help="compare this device with float64 on its CPU")
    for command in (runs, checks):
        _add_run_flags(command, reference=command is runs)
    compares = commands.add_parser("compare", help="compare two dumps")
    compares.add_argument("dumps", nargs=2, type=Path, metavar="FILE", help="what `run` wrote")
    cases = commands.add_parser(
        "case", help="look at an operator that a run's --hetero-check-operators found wrong"
    )
    cases.add_argument("case", type=Path, metavar="FILE", help="what the run wrote")
    options, rest = parser.parse_known_args(argv)
    if rest and options.command in ("compare", "case"):
        files = "two files" if options.command == "compare" else "one file"
        parser.error(f"{options.command} takes {files} and no {rest[0]}")
    options.flags = rest
    return options


class _Command(Parser):
    """The parser of one command, as argparse builds it."""

    def __init__(self, *, prog: str) -> None:
        listed = "Flags that are not listed here are those of pretrain_gpt.py."
        super().__init__(listed, prog=prog, takes_run_flags=True)


def _add_run_flags(parser: argparse.ArgumentParser, *, reference: bool) -> None:
    devices = ["cuda", "cpu", *(["reference"] if reference else [])]
    parser.add_argument(
        "--device",
        choices=devices,
        default=argparse.SUPPRESS,
        help="cuda is any GPU, AMD's too; reference is float64 on the CPU; default: cuda, or cpu "
        "where there is no GPU",
    )
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        default="bf16",
        help="of weights and inputs, whatever the model's flags say",
    )
    parser.add_argument("--layers", type=integer(1), default=1, help="layers to run")
    parser.add_argument(
        "--sample",
        type=integer(0),
        default=_SAMPLE,
        help="elements of each tensor to keep and compare; 0: all",
    )


def _record(options: argparse.Namespace, device: str | None) -> Dump:
    import_megatron_core()
    from hetero.tools.operators.layer_flags import layer_arguments
    from hetero.tools.operators.recording import default_device, record

    args = layer_arguments(options.flags, dtype=options.dtype, layers=options.layers)
    return record(args, device=device or default_device(), sample=options.sample)


def _run(options: argparse.Namespace) -> tuple[str, bool]:
    from hetero.tools.operators.dump import write

    require_results_file(options.out)
    dump = _record(options, getattr(options, "device", None))
    write(dump, options.out)
    size = options.out.stat().st_size / 2**20
    return (
        f"{options.out}: {counted(len(dump.header.operators), 'operator')} of {dump.header.label} "
        f"in {dump.header.dtype}, {size:.1f} MiB"
    ), True


def _check(options: argparse.Namespace) -> tuple[str, bool]:
    from hetero.tools.operators.comparison import compare

    ours = _record(options, getattr(options, "device", None))
    return _report(compare(ours, _record(options, "reference")))


def _compare(options: argparse.Namespace) -> tuple[str, bool]:
    from hetero.tools.operators.comparison import compare
    from hetero.tools.operators.dump import read

    left, right = map(read, options.dumps)
    return _report(compare(left, right))


def _case(options: argparse.Namespace) -> tuple[str, bool]:
    import torch

    from hetero.observe.operators.case import again, judge, read
    from hetero.tools.operators.comparison import case_lines

    case = read(options.case)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    here = again(case, device)
    recorded = judge(case)
    lines = case_lines(case, recorded, None if here is None else judge(here), device=device.type)
    return "\n".join(lines), all(each.difference.passed for each in recorded)


def _report(comparison: Comparison) -> tuple[str, bool]:
    from hetero.tools.operators.comparison import lines

    return "\n".join(lines(comparison)), comparison.passed


_COMMANDS = {"run": _run, "check": _check, "compare": _compare, "case": _case}
