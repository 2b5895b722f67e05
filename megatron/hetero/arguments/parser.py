"""Parses and checks the command line, without importing torch."""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from hetero.errors import UserError
from hetero.text import HelpFormatter
from megatron.hetero.arguments.config_file import FLAG as CONFIG_FILE_FLAG
from megatron.hetero.arguments.config_file import expand_config_files
from megatron.hetero.arguments.flags_checkpoint import add_checkpoint_flags
from megatron.hetero.arguments.flags_data import add_data_flags
from megatron.hetero.arguments.flags_hetero import add_hetero_flags
from megatron.hetero.arguments.flags_logging import add_logging_flags
from megatron.hetero.arguments.flags_model import add_model_flags
from megatron.hetero.arguments.flags_optimizer import add_optimizer_flags
from megatron.hetero.arguments.flags_parallel import add_parallel_flags
from megatron.hetero.arguments.flags_training import add_training_flags
from megatron.hetero.arguments.installed_layers import fall_back
from megatron.hetero.arguments.problems import Arguments, Problems
from megatron.hetero.arguments.segments import Segment, split_words, without_line_ends
from megatron.hetero.arguments.unknown import explain_stray, explain_unknown, intended_flags
from megatron.hetero.arguments.unsupported_flags import (
    check_unsupported,
    feature_of,
    is_unsupported,
)
from megatron.hetero.arguments.validate import REQUIRED, check_flags, check_sizes
from megatron.hetero.checkpoint.checkpoint_args import load_args_from_checkpoint
from megatron.hetero.rendezvous import environment_rank


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises UserError, and that lists its flags."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)

    @property
    def flags(self) -> frozenset[str]:
        """All option strings, aliases included."""
        return frozenset(flag for action in self._actions for flag in action.option_strings)


def build_parser() -> Parser:
    """The parser with every flag, before any value is checked against another."""
    parser = Parser(
        prog="hetero pretrain",
        description="Train a GPT-style model with Megatron-LM's flags, on one vendor or on two.",
        allow_abbrev=False,
        exit_on_error=False,
        formatter_class=HelpFormatter,
    )
    parser.add_argument_group("configuration file").add_argument(
        CONFIG_FILE_FLAG,
        metavar="FILE",
        # Replaced by the flags in the file before argparse runs, so it has no value.
        default=argparse.SUPPRESS,
        help="YAML file of flags, or a preset by its name, read before the command line; may be "
        "given several times",
    )
    add_model_flags(parser)
    add_training_flags(parser)
    add_optimizer_flags(parser)
    add_parallel_flags(parser)
    add_data_flags(parser)
    add_logging_flags(parser)
    add_hetero_flags(parser)
    add_checkpoint_flags(parser)
    # megatron-core reads these sizes, which are always 1 here.
    parser.set_defaults(context_parallel_size=1, expert_model_parallel_size=1)
    return parser


def parse_args(
    argv: Sequence[str] | None = None, *, world_size: int | None = None
) -> argparse.Namespace:
    """The checked arguments of `argv` (the command line where left out).

    `world_size` is that of the environment (WORLD_SIZE) where left out. With --hetero-plan the
    parallel sizes, and what is derived from them, are not set: `layout.apply_plan_file` reads the
    plan's file and sets them. Raises UserError with all errors.
    """
    problems = Problems()
    args = collect_args(argv, problems, world_size=world_size)
    problems.refuse()
    return args


def collect_args(
    argv: Sequence[str] | None, problems: Problems, *, world_size: int | None = None
) -> Arguments:
    """As `parse_args`, but with all errors added to `problems`.

    Reading the value of a refused flag raises `Unknowable`.
    """
    words = without_line_ends(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    with_files = problems.read(lambda: expand_config_files(words, parser))
    expanded, file_notes = with_files or (words, [])
    offered, notes, intended = _select_offered(split_words(expanded), parser, problems)
    args, given = _parse(offered, parser, problems)
    for flag in intended:
        _forget(args, flag, parser)
    if with_files is None:
        # A file that cannot be read may have set any of them.
        for action in parser._actions:
            if not set(action.option_strings) & set(given) and action.dest in vars(args):
                delattr(args, action.dest)
    args.ignored_flags = [*notes, *file_notes]
    args.typed_flags, args.taken_flags = given, []
    if world_size is None and (ranks := problems.read(environment_rank)):
        _, world_size, _ = ranks
    problems.run(_take_checkpoint_args(args, parser))
    fall_back(args)
    check_flags(args, given, problems)
    if world_size is not None:
        args.world_size = world_size
        # A plan's file has the sizes; where it was named wrongly, nothing is known of them.
        if vars(args).get("hetero_plan", "") is None:
            check_sizes(args, problems)
    return args


def _select_offered(
    segments: Sequence[Segment], parser: Parser, problems: Problems
) -> tuple[list[Segment], list[str], list[str]]:
    """The segments for argparse, notes on others, and the flags that unknown ones may mean."""
    known = parser.flags
    offered: list[Segment] = []
    unsupported: list[Segment] = []
    intended: list[str] = []
    errors: list[str] = []
    for segment in segments:
        flag = segment.flag
        if flag in ("", "--"):
            words = [word for word in segment.words() if word != "-h"]
            errors += [explain_stray(word, segment, known) for word in words]
            offered += [segment] * ("-h" in segment.values)
        elif flag in known:
            offered.append(segment)
        elif is_unsupported(flag):
            unsupported.append(segment)
        else:
            similar = intended_flags(flag, sorted(known))
            intended += similar
            if not similar and feature_of(flag) is not None:
                unsupported.append(segment)
            else:
                errors.append(explain_unknown(flag, sorted(known)))
    refused, notes = check_unsupported(unsupported)
    problems.run(errors, refused)
    return offered, notes, intended


def _parse(
    segments: Sequence[Segment], parser: Parser, problems: Problems
) -> tuple[Arguments, tuple[str, ...]]:
    """Run argparse; returns the arguments and the flags that it could parse.

    If it refuses any, each is parsed alone, so that every error is reported.
    """
    readable = list(segments)
    try:
        args, left_over = parser.parse_known_args(_joined(segments), Arguments())
    except argparse.ArgumentError:
        readable, refused = [], []
        for segment in segments:
            try:
                parser.parse_known_args(segment.words(), Arguments())
                readable.append(segment)
            except argparse.ArgumentError as error:
                refused.append(segment.flag)
                problems.run([_list_error(segment, parser) or _error_text(error)])
        args, left_over = parser.parse_known_args(_joined(readable), Arguments())
        for flag in refused:
            _forget(args, flag, parser)
    for word in left_over:
        segment = next((one for one in readable if word in one.values), Segment(""))
        error_text = _list_error(segment, parser) if segment.joined else None
        problems.run([error_text or explain_stray(word, segment, parser.flags)])
    return args, tuple(dict.fromkeys(segment.flag for segment in readable))


def _joined(segments: Sequence[Segment]) -> list[str]:
    return [word for segment in segments for word in segment.words()]


def _forget(args: Arguments, flag: str, parser: Parser) -> None:
    """Remove the value of a flag, so that reading it raises `Unknowable`."""
    for action in parser._actions:
        if flag in action.option_strings and action.dest in vars(args):
            delattr(args, action.dest)


def _list_error(segment: Segment, parser: Parser) -> str | None:
    """The error for a list typed as one word; None unless it is valid as several words."""
    items = [part for value in segment.values for part in value.replace(",", " ").split()]
    try:
        _, left_over = parser.parse_known_args([segment.flag, *items], Arguments())
    except argparse.ArgumentError:
        return None
    takes = f"{segment.flag} takes words with spaces between"
    return None if left_over or not items else f"{takes}: {segment.flag} {' '.join(items)}"


def _take_checkpoint_args(args: Arguments, parser: Parser) -> Iterator[str]:
    if not args.use_checkpoint_args:
        return
    try:
        load_args_from_checkpoint(args, parser)
    except UserError as error:
        yield str(error)
        # The checkpoint could have set these.
        for name in (*REQUIRED, "tokenizer_type"):
            if vars(args).get(name) is None:
                vars(args).pop(name, None)


def _error_text(error: argparse.ArgumentError) -> str:
    """argparse's message about one flag, rewritten to begin with the flag."""
    flag = (error.argument_name or "").split("/")[0]
    choice = re.fullmatch(r"invalid choice: (.+) \(choose from (.+)\)", error.message)
    if choice:
        return f"{flag} cannot be {choice[1]}; choose from {choice[2]}"
    if error.message.startswith("expected"):
        return f"{flag} lacks a value: {error.message}"
    if error.message.startswith("ignored explicit argument"):
        return f"{flag} takes no value; remove what follows the ="
    return f"{flag} {error.message}"
