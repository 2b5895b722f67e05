"""Lists the parser's flags, for docs/flags.md and for tests."""

import argparse
from dataclasses import dataclass

from megatron.training.arguments.parser import build_parser
from megatron.training.arguments.unsupported_flags import OTHERS, feature_of

SAME, OURS = "same", "ours"
# Flags that Megatron-LM does not have, beside those that begin with --hetero-.
OURS_BY_NAME = frozenset({"--metrics-file", "--keep-last", "--exit-on-save-failure"})
# How flags differ from Megatron-LM's of the same name.
DEPARTURES = {
    "--yaml-cfg": "Megatron's replaces the command line; here the file's flags come before it",
    "--transformer-impl": "the default is local, which exists for every vendor",
    "--attention-backend": "chooses among torch's kernels with --transformer-impl local",
    "--padded-vocab-size": "checked against the tokenizer and the tensor-parallel size",
    "--eval-interval": "the default of Megatron up to core 0.15; None, no evaluation, since",
    "--rampup-batch-size": "goes with --train-iters too, which Megatron refuses",
    "--fim-data": (
        "what is drawn for a sample follows from its index and --seed, in any layout and after a "
        "restart, and not from the order of reading; end tokens stay where they are; a token that "
        "the tokenizer lacks is refused and not taken for the unknown one"
    ),
    "--fim-rate": "0 is taken too",
    "--fim-spm-rate": "0 is taken too",
    "--tokenizer-type": "ByteLevelTokenizer is an addition, from megatron-core",
    "--pipeline-model-parallel-size": "1 and the sum of --hetero-pipeline-sizes are the same there",
    "--step-batch-size-schedule": "of core 0.18 and later",
    "--eval-global-batch-size": "of core 0.18 and later",
    "--eval-micro-batch-size": "of core 0.18 and later",
}


@dataclass(frozen=True)
class Entry:
    """One flag with its aliases."""

    group: str
    flags: tuple[str, ...]
    kind: str
    default: str
    help: str
    choices: tuple[str, ...] = ()


def describe_parser() -> list[Entry]:
    """Every flag of the parser, in the order of --help."""
    return [
        _entry(group.title or "", action)
        for group in build_parser()._action_groups
        for action in group._group_actions
        if any(name.startswith("--") for name in action.option_strings) and action.dest != "help"
    ]


def describe_refused(flag: str) -> tuple[str, str]:
    """Whether a flag that the parser does not have is `taken` or `refused`, and why."""
    feature = feature_of(flag)
    if feature is None:
        return "refused", "not a flag of this program"
    option = feature.options.get(flag)
    if option is not None and option.asks_for_nothing(("1",)):
        return "taken", "nothing is asked for"
    if feature.kind == "idle":
        return "taken", feature.detail
    if option is None or flag in feature.switches or feature.kind == "each":
        return "refused", "a flag of Megatron-LM" if feature.name == OTHERS else feature.name
    return "taken", feature.asks_for_nothing_alone


def _entry(group: str, action: argparse.Action) -> Entry:
    flags = tuple(name for name in action.option_strings if name.startswith("--"))
    is_ours = any(flag.startswith("--hetero-") or flag in OURS_BY_NAME for flag in flags)
    departure = next((DEPARTURES[flag] for flag in flags if flag in DEPARTURES), None)
    return Entry(
        group=group,
        flags=flags,
        kind=OURS if is_ours else SAME,
        default=_default(action),
        help=f"{action.help} ({departure})" if departure else action.help or "",
        choices=tuple(map(str, action.choices or ())),
    )


def _default(action: argparse.Action) -> str:
    if action.nargs == 0 or action.default in (None, argparse.SUPPRESS):
        return ""
    if isinstance(action.default, list | tuple):
        return " ".join(map(str, action.default))
    if isinstance(action.default, float):
        return f"{action.default:g}"
    return str(action.default)
