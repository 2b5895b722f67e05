"""Public pre-training scripts of dense GPT, LLaMA and Qwen2 models: no flag of them is a riddle.

`public_scripts.json` lists, for each script, the flags that it passes as it is written (`always`)
and those behind its switches (`sometimes`), with placeholders for files.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from hetero.errors import UserError
from megatron.training.arguments import parse_args
from megatron.training.arguments.listing import describe_parser, describe_refused

SCRIPTS = json.loads(Path(__file__).with_name("public_scripts.json").read_text())


def _flags(script: dict[str, Any]) -> set[str]:
    words = f"{script['always']} {script['sometimes']}".split()
    return {word.split("=")[0] for word in words if word.startswith("--")}


ALL_FLAGS = sorted(set().union(*map(_flags, SCRIPTS)))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script["name"])
def test_a_script_is_accepted_as_it_is_written(script: dict[str, Any]) -> None:
    """Or refused in one sentence that names the one flag that it has to do without."""
    words = shlex.split(script["always"])
    refused = script.get("refused_as_written")
    if refused is None:
        args = parse_args(words, world_size=script["gpus"])
        assert args.data_parallel_size * args.pipeline_model_parallel_size >= 1
        return
    with pytest.raises(UserError, match=refused):
        parse_args(words, world_size=script["gpus"])


def test_there_are_scripts_of_both_vendors_and_of_every_model() -> None:
    assert {script["repository"] for script in SCRIPTS} == {
        "NVIDIA/Megatron-LM",
        "ROCm/Megatron-LM",
    }
    names = " ".join(script["name"] for script in SCRIPTS)
    assert all(model in names for model in ("GPT", "LLaMA-2", "LLaMA-3", "Qwen2"))
    assert len(ALL_FLAGS) > 100


@pytest.mark.parametrize("flag", ALL_FLAGS)
def test_a_flag_of_a_script_is_known_or_refused_by_the_name_of_its_feature(flag: str) -> None:
    known = {name for entry in describe_parser() for name in entry.flags}
    if flag in known:
        return
    sentence = describe_refused(flag)
    assert sentence.startswith((f"{flag} is a flag of ", f"{flag}: "))
    assert "is not a flag" not in sentence
