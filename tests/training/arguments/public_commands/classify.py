"""What kind of model a command trains, and which of the features that are left out it asks for."""

from __future__ import annotations

import re
from collections.abc import Sequence

DENSE = "dense"
# In order: the first that a command shows.
KINDS = (
    ("reinforcement learning", r"--perform-rl-step|--rl-.*"),
    (
        "mixture of experts",
        r"--num-experts|--moe-(?!token-disp|use-leg|per-layer|aux).*-size|--enable-expert-.*",
    ),
    ("hybrid or Mamba", r"--is-hybrid-model|--hybrid-.*|--mamba-.*"),
    ("multi-latent attention", r"--multi-latent-attention"),
    ("other attention", r"--experimental-attention-variant|--linear-attention-.*"),
    ("retrieval", r"--retro-.*"),
    ("vision", r"--vision-.*|--img-.*|--patch-tokenizer-type"),
)
NOT_GPT = re.compile(
    r"bert|t5|vlm|llava|vision|mamba|retro|ict|hybrid|rl|dpo|finetune", re.IGNORECASE
)
SWITCHES = {
    "FP8 or FP4": r"--fp8-(format|e4m3|hybrid)|--fp4-format|--te-precision-config-file",
    "FSDP": r"--use-(torch|megatron|custom)-fsdp\d*|--use-ascend-fsdp|--fsdp2-config-path",
}
OFF = ("", "0", "1", "none", "None", "null")


def given(words: Sequence[str]) -> dict[str, str]:
    """Flags and the value that follows each, empty where none does."""
    flags: dict[str, str] = {}
    for place, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            following = words[place + 1] if place + 1 < len(words) else ""
            flags[name] = value if equals else "" if following.startswith("--") else following
    return flags


def kind_of(program: str, words: Sequence[str]) -> str:
    if NOT_GPT.search(program):
        return f"not GPT ({program})"
    flags = given(words)
    for kind, pattern in KINDS:
        for flag, value in flags.items():
            if re.fullmatch(pattern, flag) and not (flag == "--num-experts" and value in OFF[1:]):
                return kind
    return DENSE


def features_of(words: Sequence[str]) -> list[str]:
    flags = given(words)
    features = [
        name
        for name, pattern in SWITCHES.items()
        if any(re.fullmatch(pattern, flag) for flag in flags)
    ]
    if (
        flags.get("--context-parallel-size", "1") not in OFF
        or "--hierarchical-context-parallel-sizes" in flags
    ):
        features.append("context parallelism")
    return features


def without_places(words: Sequence[str]) -> list[str]:
    """`words` with the folders of the machines they were written for left out of long paths."""
    short = []
    for word in words:
        if word.startswith("/") and " " not in word and len(word) > 30:
            word = "/path/" + word.rstrip("/").rsplit("/", 1)[1]
        short.append(word)
    return short
