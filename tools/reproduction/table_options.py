"""The command line of tools/reproduce_table.py, and what is refused before any row starts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from hetero.errors import UserError
from hetero.link.names import TRANSPORTS
from hetero.words import counted
from tools import tool_command_line
from tools.real_text.data_set import NAME as TEXT_NAME
from tools.reproduction.settings import (
    HOMOGENEOUS,
    LLAMA3_8B,
    MODELS,
    ROWS,
    VENDORS,
    model_setting,
)
from tools.reproduction.table_rows import Options, parsed_row


def parse_options(argv: Sequence[str], *, description: str) -> Options:
    """Read the command line. Exits with 2 and one sentence on bad input, as does what it calls."""
    words = list(argv)
    cut = words.index("--") if "--" in words else len(words)
    given = _parser(description).parse_args(words[:cut])
    setting = model_setting(given.model)
    options = Options(
        setting=setting,
        nproc=given.nproc,
        rows=tuple(dict.fromkeys(given.rows)),
        rounds=given.rounds,
        iterations=given.iterations,
        warmup=given.warmup,
        layers=tuple(given.layers) if given.layers else setting.layers,
        seq_length=given.seq_length or setting.seq_length,
        micro_batch_size=given.micro_batch_size or setting.micro_batch_size,
        global_batch_size=given.global_batch_size or setting.global_batch_size,
        data_path=tuple(given.data_path or ()),
        deadline=given.deadline,
        out=Path(given.out).absolute(),
        extra=tuple(words[cut + 1 :]),
    )
    _check(options)
    return _without_comparison(options) if _changes_model(options) else options


MODEL_SIZES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("kv_channels", "padded_vocab_size"),
)


def _changes_model(options: Options) -> bool:
    """Whether the user's own flags make another model of a published one."""
    if not options.setting.published:
        return False
    row = options.rows[0]
    changed = parsed_row(options, row)
    published = parsed_row(replace(options, extra=(), layers=options.setting.layers), row)
    return any(getattr(changed, name) != getattr(published, name) for name in MODEL_SIZES)


def _without_comparison(options: Options) -> Options:
    setting = options.setting
    changed = replace(setting, name=f"a model changed from {setting.name}", published={})
    return replace(options, setting=changed)


def _parser(description: str) -> argparse.ArgumentParser:
    parser = tool_command_line.Parser(description)
    parser.add_argument(
        "--model",
        default=LLAMA3_8B.name,
        help=f"{', '.join(MODELS)}, or a preset file",
    )
    parser.add_argument("--nproc", type=int, default=2, help="GPUs (processes, on CPU): two stages")
    parser.add_argument(
        "--rows",
        nargs="+",
        default=list(ROWS),
        choices=(HOMOGENEOUS, *TRANSPORTS),
        metavar="ROW",
        help=f"{HOMOGENEOUS}, or a transport: {', '.join(TRANSPORTS)}",
    )
    parser.add_argument(
        "--rounds", type=int, default=1, help="times every row runs; every second round backwards"
    )
    parser.add_argument("--iterations", type=int, default=6, help="iterations of one run")
    parser.add_argument("--warmup", type=int, default=3, help="iterations left away at its start")
    parser.add_argument(
        "--layers", type=int, nargs=2, help="of each stage; left out: as published, or halves"
    )
    for flag in ("--seq-length", "--micro-batch-size", "--global-batch-size"):
        parser.add_argument(flag, type=int, help="left out: the model's")
    parser.add_argument(
        "--data-path", nargs="+", help=f"as of pretrain_gpt.py; left out: {TEXT_NAME}"
    )
    parser.add_argument(
        "--deadline", type=float, default=600.0, help="seconds for one run, start-up included"
    )
    parser.add_argument("--out", required=True, help="folder for the results")
    return parser


def _check(options: Options) -> None:
    """Refuse what no row could run with, before the first one starts."""
    stages = len(VENDORS)
    if options.nproc < stages or options.nproc % stages:
        raise UserError(
            f"--nproc {options.nproc} cannot be shared by {stages} pipeline stages; give a "
            f"multiple of {stages}"
        )
    if not 1 <= options.warmup < options.iterations:
        raise UserError(
            f"--warmup {options.warmup} leaves nothing of "
            f"{counted(options.iterations, 'iteration')} to "
            "measure, or keeps the first, which pays for start-up; give at least 1 and less than "
            "--iterations"
        )
    if options.rounds < 1 or options.deadline <= 0:
        raise UserError("--rounds and --deadline must be above zero; change them")
    gpus = torch.cuda.device_count()
    if torch.cuda.is_available() and gpus < options.nproc:
        raise UserError(f"--nproc {options.nproc} needs as many GPUs and there are {gpus}")
    for word in options.data_path:
        if not word.replace(".", "", 1).isdigit() and not Path(f"{word}.idx").is_file():
            raise UserError(
                f"--data-path {word}: there is no {word}.idx; give the prefix that "
                "tools/preprocess_data.py wrote"
            )
    for row in options.rows:
        parsed_row(options, row)
