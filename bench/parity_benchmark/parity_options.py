"""The command line of bench/benchmark_parity.py, and what is refused before any run starts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bench.parity_benchmark.parity_runs import (
    KERNELS,
    LLAMA_113M,
    PAIR,
    SETTINGS,
    Run,
    Setting,
    parsed_run,
    planned_runs,
)
from bench.parity_benchmark.side_by_side import VISIBLE, gpu_names
from bench.reproduction.run_options import MODEL_SIZES
from hetero.errors import UserError
from hetero.link import TRANSPORTS
from hetero.planner.model_shape import model_shape
from hetero.text import integer, number
from hetero.tools import tool_command_line

Number = TypeVar("Number", int, float)

CPU_TRANSPORTS = ("gloo", "cpu-forward")
"""Without a GPU, unless the command line names others: device-direct joins GPUs."""


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    setting: Setting
    gpus: tuple[str, ...]
    """Empty where the processes run on the CPU."""
    processes: int
    per_pair: int
    iterations: int
    runs: tuple[Run, ...]
    deadline: float
    """Seconds of one run."""
    minutes: float
    """Of all runs together."""
    out: Path
    extra: tuple[str, ...]
    arguments: argparse.Namespace
    """The checked arguments of the first run."""
    is_changed_model: bool
    """The user's own flags make it another model than the setting's."""

    @property
    def model_name(self) -> str:
        name = self.setting.name
        return f"{name} (modified)" if self.is_changed_model else name

    @property
    def tokens(self) -> int:
        """That one run sees."""
        return self.iterations * self.arguments.global_batch_size * self.arguments.seq_length

    @property
    def parameters_of_layers(self) -> int:
        """Without the embedding and the output layer, whose vocabulary the tokenizer decides."""
        shape = model_shape(self.arguments, vocabulary=1)
        return shape.layers * shape.layer_parameters + shape.norm_weights * shape.hidden


def parse_options(argv: Sequence[str], *, description: str) -> Options:
    """Read the command line. Exits with 2 and one sentence on bad input, as does what it calls."""
    given, extra = _parser(description).parse_with_run_flags(argv)
    setting = SETTINGS[given.model]
    gpus = tuple(gpu_names())
    default_transports = setting.transports if gpus else CPU_TRANSPORTS
    transports = tuple(dict.fromkeys(given.transports or default_transports))
    kernels = tuple(dict.fromkeys(given.kernels or setting.kernels))
    processes = _processes(given.processes, gpus)
    iterations = _chosen(given.iterations, setting.iterations)
    runs = tuple(planned_runs(kernels, transports))
    per_pair = _chosen(given.per_pair, setting.per_pair)
    deadline = _chosen(given.deadline, setting.deadline)
    out = Path(given.out).absolute()
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {given.out} is a file; name a folder")
    arguments = [parsed_run(setting, run, iterations=iterations, extra=extra) for run in runs]
    unchanged = parsed_run(setting, runs[0], iterations=iterations, extra=())
    return Options(
        setting=setting,
        gpus=gpus,
        processes=processes,
        per_pair=per_pair,
        iterations=iterations,
        runs=runs,
        deadline=deadline,
        minutes=given.minutes,
        out=out,
        extra=tuple(extra),
        arguments=arguments[0],
        is_changed_model=any(
            getattr(arguments[0], size) != getattr(unchanged, size) for size in MODEL_SIZES
        ),
    )


def _chosen(given: Number | None, default: Number) -> Number:
    return default if given is None else given


def _processes(given: int | None, gpus: Sequence[str]) -> int:
    """How many processes train at the same place, in pairs. Raises UserError."""
    processes = _chosen(given, len(gpus) - len(gpus) % PAIR if gpus else PAIR)
    if gpus and max(processes, PAIR) > len(gpus):
        raise UserError(
            f"{max(processes, PAIR)} processes need as many GPUs and there are {len(gpus)}; change "
            f"--processes or {VISIBLE}"
        )
    if processes < PAIR or processes % PAIR:
        raise UserError(f"--processes {processes} is no multiple of {PAIR}; every run takes {PAIR}")
    return processes


def _parser(description: str) -> tool_command_line.Parser:
    parser = tool_command_line.Parser(description)
    parser.add_argument(
        "--model", choices=tuple(SETTINGS), default=LLAMA_113M.name, help="what is trained"
    )
    parser.add_argument(
        "--iterations",
        type=integer(1),
        help="of every run; default: the model's",
    )
    parser.add_argument(
        "--processes", type=int, help="GPUs to use, in pairs; default: all, or 2 on CPU"
    )
    parser.add_argument(
        "--per-pair",
        type=integer(1),
        help="runs that share a pair of GPUs at the same time; default: the model's",
    )
    parser.add_argument("--kernels", nargs="+", choices=tuple(KERNELS), help="default: the model's")
    parser.add_argument(
        "--transports",
        nargs="+",
        choices=TRANSPORTS,
        metavar="TRANSPORT",
        help=f"of the mixed runs, of {', '.join(TRANSPORTS)}; default: the model's",
    )
    parser.add_argument(
        "--deadline",
        type=number(above=0),
        help="seconds of one run, start-up included; default: the model's",
    )
    parser.add_argument(
        "--minutes",
        type=number(above=0),
        default=9.0,
        help="minutes for all runs; what has not ended by then fails",
    )
    parser.add_argument("--out", required=True, help="folder for the results")
    return parser
