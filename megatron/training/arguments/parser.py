"""From the words of the command line to checked arguments, without importing torch."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from hetero.errors import UserError
from hetero.help_text import HelpFormatter
from megatron.training.arguments.checkpoint import add_checkpoint_flags
from megatron.training.arguments.config_file import FLAG as CONFIG_FILE_FLAG
from megatron.training.arguments.config_file import expand_config_files
from megatron.training.arguments.data import add_data_flags
from megatron.training.arguments.hetero import add_hetero_flags
from megatron.training.arguments.ignored import add_ignored_flags, describe_ignored
from megatron.training.arguments.logging import add_logging_flags
from megatron.training.arguments.model import add_model_flags
from megatron.training.arguments.optimizer import add_optimizer_flags
from megatron.training.arguments.parallel import add_parallel_flags
from megatron.training.arguments.training import add_training_flags
from megatron.training.arguments.unknown import explain_unknown
from megatron.training.arguments.validate import check_flags, finish_validation
from megatron.training.checkpoint.adoption import adopt_checkpoint_args


class Parser(argparse.ArgumentParser):
    """argparse whose every complaint is a `UserError`, and which knows the names of its flags."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)

    @property
    def flags(self) -> frozenset[str]:
        return frozenset(flag for action in self._actions for flag in action.option_strings)


def build_parser() -> Parser:
    """The parser with every flag, before any value is checked against another."""
    parser = Parser(
        prog="pretrain_gpt.py",
        description="Train a GPT-style model with Megatron-LM's flags, on one vendor or on two.",
        allow_abbrev=False,
        exit_on_error=False,
        formatter_class=HelpFormatter,
    )
    parser.add_argument_group("configuration file").add_argument(
        CONFIG_FILE_FLAG,
        metavar="FILE",
        # Replaced by what the file holds before argparse sees it, so it leaves no value behind.
        default=argparse.SUPPRESS,
        help="YAML file of flags, read before the command line; may be given several times",
    )
    add_model_flags(parser)
    add_training_flags(parser)
    add_optimizer_flags(parser)
    add_parallel_flags(parser)
    add_data_flags(parser)
    add_logging_flags(parser)
    add_hetero_flags(parser)
    add_checkpoint_flags(parser)
    add_ignored_flags(parser)
    return parser


def parse_args(
    argv: Sequence[str] | None = None, *, world_size: int | None = None
) -> argparse.Namespace:
    """The checked arguments of `argv` (the command line where left out).

    `world_size` is read from WORLD_SIZE where left out. With --hetero-plan the parallel sizes may
    come from the plan's file, which is not read here: whoever reads it sets them and then calls
    `finish_validation`. In every other case that has been done when this returns.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    words = expand_config_files(words, parser)
    given = _given_flags(words, parser)
    args = _parse(words, parser)
    args.rank = _environment_integer("RANK", 0)
    args.world_size = _environment_integer("WORLD_SIZE", 1) if world_size is None else world_size
    if args.world_size < 1:
        raise UserError(f"the world size must be at least 1, not {args.world_size}; check torchrun")
    if args.local_rank is None:
        args.local_rank = _environment_integer("LOCAL_RANK", 0)
    args.ignored_flags = describe_ignored(given)
    args.typed_flags, args.taken_flags = given, []
    if args.use_checkpoint_args:
        adopt_checkpoint_args(args, parser)
    check_flags(args, given)
    if args.hetero_plan is None:
        finish_validation(args, args.world_size)
    return args


def _given_flags(words: Sequence[str], parser: Parser) -> tuple[str, ...]:
    """The flags in the order typed; the first that does not exist is an error.

    This comes before argparse, because a value next to a mistyped flag would otherwise be blamed.
    """
    known = parser.flags
    given = [word.split("=", 1)[0] for word in words if word.startswith("--") and word != "--"]
    for flag in given:
        if flag not in known:
            raise UserError(explain_unknown(flag, sorted(known)))
    return tuple(dict.fromkeys(given))


def _parse(words: Sequence[str], parser: Parser) -> argparse.Namespace:
    try:
        args, left_over = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise UserError(_sentence(error)) from None
    if left_over:
        raise UserError(
            f"{left_over[0]!r} belongs to no flag; put a flag before it, or quotes around a value "
            "with spaces"
        )
    return args


def _sentence(error: argparse.ArgumentError) -> str:
    """argparse's complaint about one flag, as a sentence that begins with the flag."""
    flag = (error.argument_name or "").split("/")[0]
    choice = re.fullmatch(r"invalid choice: (.+) \(choose from (.+)\)", error.message)
    if choice:
        return f"{flag} cannot be {choice[1]}; choose from {choice[2]}"
    if error.message.startswith("expected"):
        return f"{flag} lacks a value: {error.message}"
    if error.message.startswith("ignored explicit argument"):
        return f"{flag} takes no value; remove what follows the ="
    return f"{flag} {error.message}"


def _environment_integer(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise UserError(
            f"the environment variable {name} must be a whole number, not {text!r}; "
            "start this program with python -m hetero.run or torchrun"
        )
    return value
