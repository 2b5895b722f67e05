"""Parses --pipeline-model-parallel-layout without megatron-core, which would import torch."""

import re

from hetero.errors import UserError
from hetero.text import counted

FLAG = "--pipeline-model-parallel-layout"
# E: embedding; t: transformer layer; L: output layer and loss. | ends a stage.
LETTERS = "EtL"
# A longer layout has a mistyped number of repetitions.
LONGEST = 100_000


def parse_layout(text: str, *, num_layers: int) -> list[str]:
    """The letters of each stage of a layout such as 'Et|(tt|)*3tL', with `num_layers` t in all.

    `(...)*n` repeats letters and bars, `x*n` one of them; commas are ignored. Raises UserError.
    """
    stages = _expand(text.replace(",", "")).split("|")
    letters = "".join(stages)
    for letter in letters:
        if letter not in LETTERS:
            raise UserError(
                f"{FLAG} {text!r} has {letter!r}; write E, t and L, | between stages, and "
                "(...)*n to repeat"
            )
    if not re.fullmatch("Et*L", letters):
        raise UserError(f"{FLAG} {text!r} must have one E at its beginning and one L at its end")
    if letters.count("t") != num_layers:
        raise UserError(
            f"{FLAG} {text!r} has {counted(letters.count('t'), 'layer')}, but --num-layers is "
            f"{num_layers}"
        )
    return stages


def _expand(text: str) -> str:
    """Write out repetitions."""
    for repeat in (r"\(([^()]+)\)\*([0-9]{1,6})", r"(.)\*([0-9]{1,6})"):
        length = len(text) + sum(len(m[1]) * int(m[2]) for m in re.finditer(repeat, text))
        if length > LONGEST:
            raise UserError(f"{FLAG} repeats a stage too often; its numbers are too large")
        text = re.sub(repeat, lambda match: match[1] * int(match[2]), text)
    return text
