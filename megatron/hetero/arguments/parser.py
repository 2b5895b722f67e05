"""Parses a command line into a checked configuration, without importing torch."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from hetero.errors import Faults, UserError
from hetero.plan import Plan
from hetero.text import HelpFormatter
from megatron.hetero.arguments.batch import BATCH_RULES
from megatron.hetero.arguments.config_file import FLAG as CONFIG_FILE_FLAG
from megatron.hetero.arguments.config_file import expand_config_files
from megatron.hetero.arguments.data import DATA_RULES
from megatron.hetero.arguments.experts import EXPERT_RULES
from megatron.hetero.arguments.flags_checkpoint import add_checkpoint_flags
from megatron.hetero.arguments.flags_data import add_data_flags
from megatron.hetero.arguments.flags_experts import add_expert_flags
from megatron.hetero.arguments.flags_hetero import add_hetero_flags
from megatron.hetero.arguments.flags_logging import add_logging_flags
from megatron.hetero.arguments.flags_model import add_model_flags
from megatron.hetero.arguments.flags_optimizer import add_optimizer_flags
from megatron.hetero.arguments.flags_parallel import add_parallel_flags
from megatron.hetero.arguments.flags_training import add_training_flags
from megatron.hetero.arguments.fp8 import FP8_RULES
from megatron.hetero.arguments.latent_attention import LATENT_ATTENTION_RULES
from megatron.hetero.arguments.model import MODEL_RULES
from megatron.hetero.arguments.multi_token_prediction import MTP_RULES
from megatron.hetero.arguments.parallel import PARALLEL_RULES
from megatron.hetero.arguments.plan import PLAN_RULES
from megatron.hetero.arguments.rules import apply_rules
from megatron.hetero.arguments.training import TRAINING_RULES
from megatron.hetero.arguments.unknown import (
    Segment,
    check_unsupported,
    explain_stray,
    explain_unknown,
    feature_of,
    intended_flags,
    is_unsupported,
)
from megatron.hetero.checkpoint.checkpoint_args import load_args_from_checkpoint
from megatron.hetero.rendezvous import environment_rank

# A regular expression may begin and end with quotes of its own.
VERBATIM = frozenset({"--tiktoken-pattern"})
QUOTES = "'\""


def _without_line_ends(words: Iterable[str]) -> list[str]:
    """Words without the carriage returns of a script with Windows' line ends."""
    return [word.rstrip("\r") for word in words if word.rstrip("\r") or not word]


def split_words(words: Iterable[str]) -> list[Segment]:
    """Split words into segments, and remove quotes that a shell's array left around values."""
    segments: list[Segment] = []
    flag, values, joined = "", [], False
    for word in words:
        if not word.startswith("--"):
            values.append(word)
            continue
        segments += _segment(flag, values, joined)
        flag, equals, value = word.partition("=")
        values, joined = [value] if equals else [], bool(equals)
    return segments + list(_segment(flag, values, joined))


def _segment(flag: str, values: Sequence[str], joined: bool) -> Iterator[Segment]:
    if flag or values:
        plain = tuple(values) if flag in VERBATIM else tuple(_without_quotes(values))
        yield Segment(flag, plain, joined)


def _without_quotes(values: Sequence[str]) -> Iterator[str]:
    """Remove a pair of quotes around all values together, or around each of them."""
    first, last = (values[0][:1], values[-1][-1:]) if values else ("", "")
    may_span = len(values) > 1 and first == last and first and first in QUOTES
    if may_span and sum(value.count(first) for value in values) == 2:
        yield values[0][1:]
        yield from values[1:-1]
        yield values[-1][:-1]
        return
    for value in values:
        paired = len(value) > 1 and value[0] == value[-1] and value[0] in QUOTES
        yield value[1:-1] if paired else value


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
    add_expert_flags(parser)
    add_training_flags(parser)
    add_optimizer_flags(parser)
    add_parallel_flags(parser)
    add_data_flags(parser)
    add_logging_flags(parser)
    add_hetero_flags(parser)
    add_checkpoint_flags(parser)
    return parser


@dataclass(frozen=True)
class Configuration:
    """A command line that is free of errors."""

    args: argparse.Namespace
    """All flags, and what is derived from them: what Megatron's own validation sets too."""
    plan: Plan
    """If the run has one vendor, that of its one mesh is `ONE_VENDOR`."""


def read_command_line(
    argv: Sequence[str] | None = None, *, world_size: int | None = None
) -> Configuration:
    """Parse and check `argv` (default: the command line), its YAML files and its plan file.

    `world_size` defaults to that of the environment (WORLD_SIZE). Raises UserError with all errors.
    Never import torch here: errors must appear at once.
    """
    problems = Faults()
    args, refused = _parse_all(argv, problems)
    if world_size is None and (ranks := problems.read(environment_rank)):
        _, world_size, _ = ranks
    inputs = vars(args) | {"world_size": world_size}
    outcome = apply_rules(
        RULES, inputs, refused | ({"world_size"} if world_size is None else set())
    )
    problems.add(outcome.errors)
    problems.refuse()
    values = outcome.values
    plan = values["plan"]
    for name in _NOT_FLAGS:
        del values[name]
    values["ignored_flags"] = [*args.ignored_flags, *outcome.notes]
    return Configuration(argparse.Namespace(**values, **_AT_START), plan)


def parse_args(
    argv: Sequence[str] | None = None, *, world_size: int | None = None
) -> argparse.Namespace:
    """The flags of `read_command_line`."""
    return read_command_line(argv, world_size=world_size).args


RULES = (
    *(*MODEL_RULES, *LATENT_ATTENTION_RULES, *MTP_RULES, *EXPERT_RULES, *FP8_RULES),
    *(*PARALLEL_RULES, *BATCH_RULES, *TRAINING_RULES, *DATA_RULES, *PLAN_RULES),
)
_NOT_FLAGS = (
    *("plan", "plan_file", "meshes", "stage_layers", "tensor_sizes", "context_sizes"),
    *("expert_sizes", "expert_tensor_sizes", "uses_fp8"),
)
"""Derived values that are not handed on as flags."""
_AT_START = {
    # A checkpoint that is loaded sets them.
    "consumed_train_samples": 0,
    "skipped_train_samples": 0,
    "consumed_valid_samples": 0,
    "variable_seq_lengths": False,
}


def _parse_all(argv: Sequence[str] | None, problems: Faults) -> tuple[argparse.Namespace, set[str]]:
    """The parsed flags, and the names of those whose value is not known because of an error."""
    words = _without_line_ends(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    with_files = problems.read(lambda: expand_config_files(words, parser))
    expanded, file_notes = with_files or (words, [])
    offered, notes, intended = _select_offered(split_words(expanded), parser, problems)
    args, given, wrong = _parse(offered, parser, problems)
    refused = {
        action.dest
        for action in parser._actions
        # A file that cannot be read may have set any flag that was not typed.
        if set(action.option_strings) & {*intended, *wrong}
        or (with_files is None and not set(action.option_strings) & set(given))
    }
    args.ignored_flags = [*notes, *file_notes]
    args.typed_flags, args.taken_flags = given, []
    if "use_checkpoint_args" not in refused and args.use_checkpoint_args:
        try:
            load_args_from_checkpoint(args, parser)
        except UserError as error:
            problems.add(error.sentences)
            # The checkpoint could have set these.
            refused |= {name for name in _OF_CHECKPOINT if getattr(args, name) is None}
    return args, refused


_OF_CHECKPOINT = (
    *("num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings"),
    *("micro_batch_size", "lr", "tokenizer_type"),
)


def _select_offered(
    segments: Sequence[Segment], parser: Parser, problems: Faults
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
    problems.add([*errors, *refused])
    return offered, notes, intended


def _parse(
    segments: Sequence[Segment], parser: Parser, problems: Faults
) -> tuple[argparse.Namespace, tuple[str, ...], list[str]]:
    """Run argparse; returns the arguments, and the flags that it could parse and could not.

    If it refuses any, each is parsed alone, so that every error is reported.
    """
    readable, refused = list(segments), []
    try:
        args, left_over = parser.parse_known_args(_joined(segments))
    except argparse.ArgumentError:
        readable = []
        for segment in segments:
            try:
                parser.parse_known_args(segment.words())
                readable.append(segment)
            except argparse.ArgumentError as error:
                refused.append(segment.flag)
                problems.add([_list_error(segment, parser) or _error_text(error)])
        args, left_over = parser.parse_known_args(_joined(readable))
    for word in left_over:
        segment = next((one for one in readable if word in one.values), Segment(""))
        error_text = _list_error(segment, parser) if segment.joined else None
        problems.add([error_text or explain_stray(word, segment, parser.flags)])
    return args, tuple(dict.fromkeys(segment.flag for segment in readable)), refused


def _joined(segments: Sequence[Segment]) -> list[str]:
    return [word for segment in segments for word in segment.words()]


def _list_error(segment: Segment, parser: Parser) -> str | None:
    """The error for a list typed as one word; None unless it is valid as several words."""
    items = [part for value in segment.values for part in value.replace(",", " ").split()]
    try:
        _, left_over = parser.parse_known_args([segment.flag, *items])
    except argparse.ArgumentError:
        return None
    takes = f"{segment.flag} takes words with spaces between"
    return None if left_over or not items else f"{takes}: {segment.flag} {' '.join(items)}"


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
