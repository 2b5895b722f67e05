"""Write docs/flags.md, every flag of pretrain_gpt.py and what it is worth here, and the table of
docs/checkpoints.md, what a checkpoint's value of each flag of the model is worth.

python -m tools.list_flags            # write them
python -m tools.list_flags --check    # exit 1 if one is out of date
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tools.tool_command_line import leave_on_interrupt

    leave_on_interrupt()

from hetero.errors import HeteroError
from megatron.training.arguments.listing import (
    OURS,
    SAME,
    Entry,
    describe_parser,
    describe_refused,
)
from megatron.training.arguments.parser import build_parser
from megatron.training.arguments.unknown import REPLACED
from megatron.training.arguments.unsupported_flags import Feature, features
from megatron.training.checkpoint.model_flags import MODEL_FLAGS, Kind, spellings
from tools.public_commands import by_source, shares, verdicts
from tools.tool_command_line import Parser, run

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "flags.md"
CHECKPOINTS = ROOT / "docs" / "checkpoints.md"
TABLE_BEGINS = "<!-- written by python -m tools.list_flags -->\n"
TABLE_ENDS = "<!-- end of what is written -->\n"

HEAD = """# Flags

Written by `python -m tools.list_flags` from the parser; `make test` says when it is out of date.

- **same**: Megatron-LM's flag and meaning (core 0.16.1); a difference is in brackets.
- **ours**: Megatron-LM does not have it.

A flag of a feature that is not offered is refused where it asks for something, in a sentence that
names the feature, and taken where it does not, so that a script runs unchanged: the log says so in
one line. Any other word is refused in one that names the nearest flag. All that is wrong is told at
once. `--yaml-cfg FILE` reads flags from a file ([presets](../examples/presets/README.md)).
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
    entries = describe_parser()
    parts = [HEAD, _counts(entries)]
    for group, members in groupby(entries, key=lambda entry: entry.group):
        parts.append(f"## {group[0].upper()}{group[1:]}\n\n{_table(members)}")
    parts.append(_left_out())
    parts.append(_public_commands(entries))
    return "\n".join(parts)


def _counts(entries: Sequence[Entry]) -> str:
    counts = [f"{sum(entry.kind == kind for entry in entries)} {kind}" for kind in (SAME, OURS)]
    return f"{len(entries)} flags: {', '.join(counts)}.\n"


def _table(entries: Iterable[Entry]) -> str:
    lines = ["| flag | | default | |", "|---|---|---|---|"]
    for entry in entries:
        flags = ", ".join(f"`{flag}`" for flag in entry.flags)
        default = f"`{entry.default}`" if entry.default else ""
        text = entry.help
        if entry.choices:
            text += ": " + ", ".join(f"`{choice}`" for choice in entry.choices)
        lines.append(f"| {flags} | {entry.kind} | {default} | {_cell(text)} |")
    return "\n".join(lines) + "\n"


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


def _public_commands(entries: Sequence[Entry]) -> str:
    """Which public command lines are accepted, and every flag of them with its worth here."""
    lines = [
        "## Public command lines\n",
        "Scripts of public repositories, run by bash against stubs, so with the words that really "
        "arrive; the\nrevisions and how they were run are in "
        "`tests/training/arguments/public_commands/`. What counts\nis a dense GPT model whose "
        "words "
        "Megatron-LM core 0.16.1 itself accepts. `python -m\ntools.public_commands` prints why "
        "the "
        "others are refused.\n",
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
    kinds = {name: entry.kind for entry in entries for name in entry.flags}
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


def with_model_flags(text: str) -> str:
    """A document with the table as it has to be."""
    before, _, rest = text.partition(TABLE_BEGINS)
    _, _, after = rest.partition(TABLE_ENDS)
    return f"{before}{TABLE_BEGINS}{render_model_flags()}{TABLE_ENDS}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only say whether they are up to date")
    args = parser.parse_args(argv)
    return run(_check if args.check else _write)


def _texts() -> dict[Path, str]:
    return {DOCUMENT: render(), CHECKPOINTS: with_model_flags(CHECKPOINTS.read_text())}


def _write() -> str:
    for document, text in _texts().items():
        document.write_text(text)
    return f"written: {DOCUMENT} and the table in {CHECKPOINTS}"


def _check() -> str:
    old = [d for d, text in _texts().items() if not d.is_file() or d.read_text() != text]
    if old:
        raise HeteroError(
            f"{' and '.join(map(str, old))} is out of date; run python -m tools.list_flags"
        )
    return f"{DOCUMENT} and {CHECKPOINTS} are up to date"


if __name__ == "__main__":
    sys.exit(main())
