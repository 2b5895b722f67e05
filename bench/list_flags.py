"""Write docs/flags.md and the tables of docs/checkpoints.md.

The one has every flag of pretrain_gpt.py and what it is worth here, the other what a checkpoint's
value of each flag of the model is worth.

python -m bench.list_flags            # write them
python -m bench.list_flags --check    # exit 1 if one is out of date
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import leave_on_interrupt

    leave_on_interrupt()

from bench.public_commands import by_source, shares, verdicts
from hetero.errors import HeteroError
from hetero.tools.tool_command_line import Parser, run
from megatron.hetero.arguments.parser import build_parser
from megatron.hetero.arguments.unknown import OTHERS, REPLACED, Feature, feature_of, features
from megatron.hetero.checkpoint.model_flags import MODEL_FLAGS, Kind, spellings
from megatron.hetero.checkpoint.resume import (
    CHECKPOINT_SCHEDULE,
    OVERRIDE_SCHEDULE,
    Holdings,
    ResumeFlags,
    resume_sources,
)

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "flags.md"
CHECKPOINTS = ROOT / "docs" / "checkpoints.md"
TABLE_BEGINS = "<!-- written by python -m bench.list_flags -->\n"
RESUME_BEGINS = "<!-- what is loaded, written by python -m bench.list_flags -->\n"
TABLE_ENDS = "<!-- end of what is written -->\n"

SAME, OURS = "same", "ours"
# Flags that Megatron-LM does not have, beside those that begin with --hetero-.
OURS_BY_NAME = frozenset(
    {
        *("--metrics-file", "--keep-last", "--exit-on-save-failure"),
        "--tokenizer-bos",
        *("--qk-layernorm-across-heads", "--reordered-norm", "--softmax-scale"),
        *("--embedding-multiplier", "--residual-multiplier", "--logits-scaling"),
    }
)
# How flags differ from Megatron-LM's of the same name.
DEPARTURES = {
    "--use-checkpoint-opt_param-scheduler": (
        "continues the checkpoint's schedule with --no-load-optim too, where Megatron's ignores it"
    ),
    "--yaml-cfg": "Megatron's replaces the command line; here the file's flags come before it",
    "--transformer-impl": "the default is local, which exists for every vendor",
    "--attention-backend": "chooses among torch's kernels with --transformer-impl local",
    "--exit-signal-handler": "Megatron's handles --exit-signal alone, SIGTERM by default",
    "--padded-vocab-size": "checked against the tokenizer and the tensor-parallel size",
    "--eval-interval": "the default of Megatron up to core 0.15; None, no evaluation, since",
    "--rampup-batch-size": (
        "goes with --train-iters too, which Megatron refuses; a growing batch saves no checkpoint"
    ),
    "--train-samples": (
        "a run resumed with another batch size ends after so many samples; Megatron's after the "
        "steps that a whole run of that size has"
    ),
    "--data-cache-path": (
        "an index follows what the token files hold, so files that were made again get a new one; "
        "Megatron's follows their path alone"
    ),
    "--dataloader-type": (
        "cyclic: all samples in one order, from --seed, in any layout; Megatron's shuffles each "
        "data-parallel rank's part, the same way for every seed"
    ),
    "--init-method-xavier-uniform": "ends Megatron-LM 0.16.1 with an error",
    "--rotary-seq-len-interpolation-factor": "Megatron-LM's pretrain_gpt.py does not read it",
    "--rope-scaling-factor": "Megatron-LM's pretrain_gpt.py does not read it, and takes 8",
    "--no-check-for-nan-in-loss-and-grad": (
        "an update that is not finite is left out, also in bfloat16, where Megatron makes it"
    ),
    "--override-opt_param-scheduler": (
        "--lr and --min-lr too, which Megatron-LM 0.16.1 keeps as they are in the checkpoint"
    ),
    "--wandb-save-dir": "left out: W&B's own choice, not a folder in --save",
    "--log-interval": "Megatron logs the first step of a launch too",
    "--fim-data": (
        "what is drawn for a sample follows from its index and --seed, in any layout and after a "
        "restart, and not from the order of reading; end tokens stay where they are; a token that "
        "the tokenizer lacks is refused and not taken for the unknown one"
    ),
    "--fim-rate": "0 is taken too",
    "--fim-spm-rate": "0 is taken too",
    "--tokenizer-type": (
        "ByteLevelTokenizer is an addition, from megatron-core; Llama2Tokenizer begins documents "
        "with <s> as Megatron-LM's own class does, not as megatron-core's: --tokenizer-bos"
    ),
    "--pipeline-model-parallel-size": "1 and the sum of --hetero-pipeline-sizes are the same there",
    "--step-batch-size-schedule": "of core 0.18 and later",
    "--eval-global-batch-size": "of core 0.18 and later",
    "--eval-micro-batch-size": "of core 0.18 and later",
}

HEAD = """# Flags

Written by `python -m bench.list_flags` from the parser; `make test` says when it is out of date.

- **same**: Megatron-LM's flag and meaning (core 0.16.1); a difference is in brackets.
- **ours**: Megatron-LM does not have it.

A flag of a feature that is not offered is refused where it asks for something, in a sentence that
names the feature, and taken where it does not, so that a script runs unchanged: the log says so in
one line. Any other word is refused in one that names the nearest flag. All that is wrong is told at
once. `--yaml-cfg FILE` reads flags from a file, or a [preset](../examples/presets/README.md) by its
name.
"""


# Of each kind: with --use-checkpoint-args, in a resumed run, in a run from weights alone.
_TREATMENT = {
    Kind.SHAPE: ("taken", "equal", "equal"),
    Kind.MEANING: ("taken", "equal", "equal"),
    Kind.TUNABLE: ("taken", "equal", "equal, or typed"),
    Kind.TRAINING: ("taken", "equal, or typed", "equal, or typed"),
    Kind.ROWS: ("taken", "told", "told"),
    Kind.TOKENIZER: ("taken", "compared", "size compared, else told"),
    Kind.LIMIT: ("taken", "free", "free"),
    Kind.SPELLING: ("as that", "as that", "as that"),
    Kind.NONE: ("no effect", "no effect", "no effect"),
}


def render() -> str:
    """All of docs/flags.md."""
    groups = {
        group.title or "": [a for a in group._group_actions if _names(a) and a.dest != "help"]
        for group in build_parser()._action_groups
    }
    actions = [action for members in groups.values() for action in members]
    kinds = Counter(map(_kind, actions))
    parts = [HEAD, f"{len(actions)} flags: {kinds[SAME]} {SAME}, {kinds[OURS]} {OURS}.\n"]
    for group, members in groups.items():
        if members:
            parts.append(f"## {group[0].upper()}{group[1:]}\n\n{_table(members)}")
    parts.append(_left_out())
    parts.append(_public_commands(actions))
    return "\n".join(parts)


def _names(action: argparse.Action) -> list[str]:
    return [name for name in action.option_strings if name.startswith("--")]


def _kind(action: argparse.Action) -> str:
    names = _names(action)
    is_ours = any(name[2:].startswith("hetero-") or name in OURS_BY_NAME for name in names)
    return OURS if is_ours else SAME


def _table(actions: Iterable[argparse.Action]) -> str:
    lines = ["| flag | | default | |", "|---|---|---|---|"]
    for action in actions:
        flags = ", ".join(f"`{name}`" for name in _names(action))
        default = f"`{text}`" if (text := _default(action)) else ""
        departures = [DEPARTURES[name] for name in _names(action) if name in DEPARTURES]
        text = " ".join([action.help or "", *(f"({departure})" for departure in departures)])
        if action.choices:
            text += ": " + ", ".join(f"`{choice}`" for choice in action.choices)
        lines.append(f"| {flags} | {_kind(action)} | {default} | {_cell(text)} |")
    return "\n".join(lines) + "\n"


def _default(action: argparse.Action) -> str:
    if action.nargs == 0 or action.default in (None, argparse.SUPPRESS):
        return ""
    if isinstance(action.default, list | tuple):
        return " ".join(map(str, action.default))
    if isinstance(action.default, float):
        return f"{action.default:g}"
    return str(action.default)


def _cell(text: str) -> str:
    return re.sub(r"([|*])", r"\\\1", text)


def _left_out() -> str:
    lines = [
        "## Not offered\n",
        "Flags of Megatron-LM that are taken where they ask for nothing: at their default there, "
        "or without the\nflag that they serve. The log says so in one line.\n",
        "| feature | refused | flags |",
        "|---|---|---|",
    ]
    for feature in features():
        flags = ", ".join(f"`{flag}`" for flag in feature.options)
        lines.append(f"| {feature.name} | {_condition(feature)} | {flags} |")
    lines.append("\n| older flag | use |\n|---|---|")
    lines += [f"| `{flag}` | `{use}` |" for flag, use in sorted(REPLACED.items())]
    return "\n".join(lines) + "\n"


def _condition(feature: Feature) -> str:
    if feature.kind == "each":
        return "with any value but the default"
    if feature.kind == "idle":
        return f"never: {feature.detail}"
    return f"with {' or '.join(f'`{flag}`' for flag in feature.switches)}"


def _public_commands(actions: Iterable[argparse.Action]) -> str:
    """Which public command lines are accepted, and every flag of them with its worth here."""
    lines = [
        "## Public command lines\n",
        "Scripts of public repositories, run by bash against stubs, so with the words that really "
        "arrive; the\nrevisions and how they were run are in "
        "`tests/megatron/arguments/public_commands/`. What counts\nis a GPT model, dense or with "
        "experts or latent attention, whose words Megatron-LM core 0.16.1\nitself accepts. "
        "`python -m bench.public_commands` prints why the others are refused.\n",
        *by_source(),
        "",
    ]
    for name, (accepted, counted) in shares().items():
        lines.append(f"- {accepted} of {counted} ({accepted / counted:.2f}): {name}")
    lines += ["\n| script | revision | |", "|---|---|---|"]
    for verdict in verdicts():
        command = verdict.command
        if not command.path.endswith(".yaml"):
            name = f"{command.repository} `{command.path}`"
            name += f", {command.variant}" if command.variant else ""
            lines.append(f"| {name} | `{command.revision}` | {_answer(verdict.refusal)} |")
    kinds = {name: _kind(action) for action in actions for name in _names(action)}
    used = Counter(name for verdict in verdicts() for name in verdict.command.flags)
    lines += ["\n| flag of these commands | | commands |", "|---|---|---|"]
    for flag, count in sorted(used.items()):
        lines.append(f"| `{flag}` | {_verdict(flag, kinds)} | {count} |")
    return "\n".join(lines) + "\n"


def _answer(refusal: str | None) -> str:
    if refusal is None:
        return "accepted"
    sentences = refusal.splitlines()
    return "refused: " + _cell("; ".join(line.strip() for line in sentences[len(sentences) > 1 :]))


def _verdict(flag: str, kinds: dict[str, str]) -> str:
    if flag in kinds:
        return kinds[flag]
    word, reason = describe_refused(flag)
    return f"{word}: {reason}"


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


def render_model_flags() -> str:
    """The table of docs/checkpoints.md: the flags of the model that are treated alike in a row."""
    spelled = spellings(build_parser())
    rows: dict[tuple[Kind, str], list[str]] = {}
    for name, flag in MODEL_FLAGS.items():
        rows.setdefault((flag.kind, flag.why), []).append(f"`{spelled[name].option}`")
    lines = [
        "| flags | `--use-checkpoint-args` | resumed run | from weights alone | why |",
        "|---|---|---|---|---|",
        *(
            f"| {', '.join(flags)} | {' | '.join(_TREATMENT[kind])} | {why} |"
            for (kind, why), flags in rows.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def render_resume_flags() -> str:
    """The table of docs/checkpoints.md: what each combination of flags loads from a checkpoint."""
    names = {field.name: f"--{field.name.replace('_', '-')}" for field in fields(ResumeFlags)}
    names["use_checkpoint_opt_param_scheduler"] = CHECKPOINT_SCHEDULE
    names["override_opt_param_scheduler"] = OVERRIDE_SCHEDULE
    lines = [
        "| flags | weights | the model's flags | iteration, place in the data | optimizer | "
        "schedule | place in the schedule | random states |",
        "|---|---|---|---|---|---|---|---|",
    ]
    combinations = itertools.chain.from_iterable(
        itertools.combinations(names, size) for size in range(3)
    )
    for combination in combinations:
        flags = ResumeFlags(**dict.fromkeys(combination, True))
        typed = " ".join(f"`{names[name]}`" for name in combination) or "none of them"
        if list(flags.contradictions()):
            lines.append(f"| {typed} | refused | | | | | | |")
            continue
        sources = resume_sources(flags, Holdings())
        cells = [getattr(sources, field.name).value for field in fields(sources)]
        lines.append(f"| {typed} | {' | '.join(cells)} |")
    sources = resume_sources(ResumeFlags(), Holdings(progress=False))
    cells = [getattr(sources, field.name).value for field in fields(sources)]
    lines.append(f"| none of them, of a checkpoint of weights alone | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_tables(text: str) -> str:
    """A document with the tables as they have to be, where it has their marks."""
    for begins, render_table in (
        (TABLE_BEGINS, render_model_flags),
        (RESUME_BEGINS, render_resume_flags),
    ):
        before, found, rest = text.partition(begins)
        if found:
            _, _, after = rest.partition(TABLE_ENDS)
            text = f"{before}{begins}{render_table()}{TABLE_ENDS}{after}"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only say whether they are up to date")
    args = parser.parse_args(argv)
    return run(_check if args.check else _write)


def _texts() -> dict[Path, str]:
    return {DOCUMENT: render(), CHECKPOINTS: with_tables(CHECKPOINTS.read_text())}


def _write() -> str:
    for document, text in _texts().items():
        document.write_text(text)
    return f"written: {DOCUMENT} and the table in {CHECKPOINTS}"


def _check() -> str:
    old = [d for d, text in _texts().items() if not d.is_file() or d.read_text() != text]
    if old:
        raise HeteroError(
            f"{' and '.join(map(str, old))} is out of date; run python -m bench.list_flags"
        )
    return f"{DOCUMENT} and {CHECKPOINTS} are up to date"


if __name__ == "__main__":
    sys.exit(main())
