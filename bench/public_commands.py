"""Print how many public Megatron-LM command lines pretrain_gpt.py accepts, and why not the others.

python -m bench.public_commands             # the table by source, and the reasons by count
python -m bench.public_commands --refused   # every refused command and its sentence
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import leave_on_interrupt

    leave_on_interrupt()

from hetero.errors import UserError
from hetero.tools.tool_command_line import Parser, run
from megatron.hetero.arguments import parse_args

DATA = (
    Path(__file__)
    .resolve()
    .parents[1]
    .joinpath("tests", "megatron", "arguments", "public_commands", "commands.json")
)
ACCEPTED = "accepted"
# Megatron-LM's own fusion of permutations needs TransformerEngine itself; its words are accepted.
WITHOUT_ENGINE = "ImportError: cannot import name 'fused_permute'"
# So do fp8 and experts together: it compares TransformerEngine's version, and has none.
WITHOUT_VERSION = "TypeError: '>=' not supported between instances of 'NoneType' and 'Version'"
DENSE, MIXED = "dense", "experts and latent attention"
MODELS = {"dense": DENSE, "mixture of experts": MIXED, "multi-latent attention": MIXED}
"""The kinds of commands.json that this program could be expected to accept."""
# What a command can ask for that this program does not offer, in the words of commands.json.
LEFT_OUT = ("FSDP",)
MUON, LINEAR_ATTENTION, BLOCKS = "Muon", "linear attention", "FP8 or FP4 in blocks"


@dataclass(frozen=True)
class Command:
    """One start of a training program by a public script.

    `kind` is the model's, `features` are those of LEFT_OUT that it asks for, `megatron` is what
    Megatron-LM 0.16.1 says to the words: "accepted" or its complaint.
    """

    repository: str
    revision: str
    path: str
    variant: str
    gpus: int
    words: tuple[str, ...]
    kind: str
    features: tuple[str, ...]
    megatron: str

    @property
    def counts(self) -> bool:
        """Whether it is one that this program could be expected to accept."""
        accepted = self.megatron == ACCEPTED or self.megatron.startswith(WITHOUT_ENGINE)
        return self.kind in MODELS and accepted and self._gives_ranks_to_experts()

    def _gives_ranks_to_experts(self) -> bool:
        """What Megatron-LM asks of the number of GPUs only after its words have been accepted."""
        tensor = self._size("tensor")
        ranks = self._size("pipeline") * self._size("expert")
        ranks *= self._size("expert-tensor", tensor)
        return self._size("expert") == 1 or self.gpus % ranks == 0

    def _size(self, kind: str, default: int = 1) -> int:
        model = "" if kind == "expert-tensor" else "-model"
        return int(self.value(f"--{kind}{model}-parallel-size") or default)

    def value(self, flag: str) -> str | None:
        """The last value of a flag that has one."""
        found = None
        for word, following in zip(self.words, (*self.words[1:], ""), strict=True):
            if word == flag:
                found = following
            elif word.startswith(f"{flag}="):
                found = word.partition("=")[2]
        return found

    @property
    def asks_for(self) -> frozenset[str]:
        """What is left out here, of all that it asks for."""
        asked = set(self.features) & set(LEFT_OUT)
        if "muon" in (self.value("--optimizer") or ""):
            asked.add(MUON)
        if "--experimental-attention-variant" in self.flags:
            asked.add(LINEAR_ATTENTION)
        if "--fp4-format" in self.flags or self.value("--fp8-recipe") in ("blockwise", "mxfp8"):
            asked.add(BLOCKS)
        return frozenset(asked)

    @property
    def name(self) -> str:
        variant = f" ({self.variant})" if self.variant else ""
        return f"{self.repository}@{self.revision}:{self.path}{variant}"

    @property
    def flags(self) -> frozenset[str]:
        return frozenset(word.split("=", 1)[0] for word in self.words if word.startswith("--"))

    def refusal(self) -> str | None:
        """Why pretrain_gpt.py refuses it, or None where it does not."""
        try:
            parse_args(self.words, world_size=self.gpus)
        except UserError as error:
            return str(error)
        return None


@dataclass(frozen=True)
class Verdict:
    """A command and what this program says to it: nothing where it is accepted."""

    command: Command
    refusal: str | None


@cache
def load_commands() -> tuple[Command, ...]:
    """The collection, in the order of its file."""
    return tuple(
        Command(
            **{
                **entry,
                "words": tuple(shlex.split(entry["words"])),
                "features": tuple(entry["features"]),
            }
        )
        for entry in json.loads(DATA.read_text(encoding="utf-8"))
    )


@cache
def verdicts() -> tuple[Verdict, ...]:
    """What this program says to every command that counts; it is asked once."""
    return tuple(Verdict(one, one.refusal()) for one in load_commands() if one.counts)


def reason(refusal: str) -> str:
    """A refusal without the values that differ from one script to the next."""
    return re.sub(r"'[^']*'|\b\d[\d.e+-]*\b", "…", refusal)


def by_source() -> list[str]:
    """A table in Markdown: a row for each repository, and one for their sum."""
    head = [f"{model}, accepted by Megatron-LM | here" for model in (DENSE, MIXED)]
    lines = [f"| source | commands | {' | '.join(head)} |", "|---" * 6 + "|"]
    collected = Counter(command.repository for command in load_commands())
    counts = []
    for model in (DENSE, MIXED):
        own = [v for v in verdicts() if MODELS[v.command.kind] == model]
        counts.append(Counter(v.command.repository for v in own))
        counts.append(Counter(v.command.repository for v in own if v.refusal is None))
    for name in sorted(collected, key=str.lower):
        row = " | ".join(str(count[name]) for count in (collected, *counts))
        lines.append(f"| {name} | {row} |")
    total = " | ".join(str(count.total()) for count in (collected, *counts))
    lines.append(f"| all | {total} |")
    return lines


def shares() -> dict[str, tuple[int, int]]:
    """Accepted and counted commands: all of them, and those that ask for nothing left out here."""
    parts = {}
    for model in (DENSE, MIXED):
        own = [v for v in verdicts() if MODELS[v.command.kind] == model]
        parts[f"{model}, and accepted by Megatron-LM"] = own
        without = ", ".join((*LEFT_OUT, MUON, LINEAR_ATTENTION, BLOCKS))
        parts[f"{model}, of these without {without}"] = [v for v in own if not v.command.asks_for]
    return {name: (sum(v.refusal is None for v in part), len(part)) for name, part in parts.items()}


def in_fp8() -> list[str]:
    """How many of the commands that ask for fp8 are accepted here, a line for each kind."""
    asking = [one for one in load_commands() if "--fp8-format" in one.flags]
    of_experts = [one for one in asking if one.megatron.startswith(WITHOUT_VERSION)]
    lines = []
    for name, commands in (
        (f"{DENSE}, accepted by Megatron-LM", [one for one in asking if one.counts]),
        (f"{MIXED}, not judged by Megatron-LM without TransformerEngine", of_experts),
    ):
        accepted = sum(one.refusal() is None for one in commands)
        lines.append(f"{accepted} of {len(commands)} with --fp8-format: {name}")
    return lines


def reasons() -> list[tuple[str, int]]:
    """Why commands that count are refused, the most frequent first."""
    refusals = [verdict.refusal for verdict in verdicts() if verdict.refusal is not None]
    return Counter(line for refusal in refusals for line in _lines(refusal)).most_common()


def _lines(refusal: str) -> list[str]:
    """The sentences of a refusal, without the line that counts them."""
    lines = refusal.splitlines()
    return [reason(line.strip()) for line in (lines[1:] if len(lines) > 1 else lines)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--refused", action="store_true", help="name every refused command")
    args = parser.parse_args(argv)
    return run(lambda: "\n".join(report(with_refused=args.refused)))


def report(*, with_refused: bool) -> list[str]:
    """The table by source, the shares, those of fp8, and the reasons by count."""
    lines = [*by_source(), ""]
    for name, (accepted, counted) in shares().items():
        lines.append(f"{accepted} of {counted} ({accepted / counted:.3f}): {name}")
    lines += ["", *in_fp8()]
    lines += ["", *(f"{count:5}  {text}" for text, count in reasons())]
    if with_refused:
        lines.append("")
        for verdict in verdicts():
            if verdict.refusal is not None:
                lines += [verdict.command.name, f"    {verdict.refusal}"]
    return lines


if __name__ == "__main__":
    sys.exit(main())
