"""The functional tests of Megatron-LM that start pretrain_gpt.py, as its own recipes list them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

RECIPES = "tests/test_utils/recipes"
CASES = "tests/functional_tests/test_cases"


def functional_tests(tree: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Path, number of GPUs and content of every model_config.yaml, values as they are written."""
    seen = set()
    for recipe in sorted((tree / RECIPES).rglob("*.yaml")):
        content = yaml.safe_load(recipe.read_text())
        spec = content.get("spec", {})
        if "TRAINING_SCRIPT_PATH=pretrain_gpt.py" not in str(spec.get("script", "")):
            continue
        for product in content.get("products") or []:
            for name in product["test_case"]:
                path = f"{CASES}/{spec['model']}/{name}/model_config.yaml"
                if path in seen or not (tree / path).is_file():
                    continue
                seen.add(path)
                yield (
                    path,
                    int(spec["nodes"]) * int(spec["gpus"]),
                    _config((tree / path).read_text()),
                )


def _config(text: str) -> dict[str, Any]:
    content = yaml.load(text, yaml.BaseLoader)
    model = dict(content["MODEL_ARGS"])
    model = {**model.pop("<<", {}), **model}
    # run_ci_test.sh does this before every run that is no release test.
    if content.get("TEST_TYPE") != "release" and "--train-iters" in model:
        model["--exit-interval"] = model["--train-iters"]
    environment = {
        name: value
        for name, value in (content.get("ENV_VARS") or {}).items()
        if re.fullmatch(r"\w+", name)
    }
    return {
        "ENV_VARS": environment,
        "MODEL_ARGS": {name: _plain(value) for name, value in model.items()},
    }


def _plain(value: Any) -> str:
    """As yq's tostring prints it, a list in one line."""
    if isinstance(value, list):
        return "[" + ", ".join(map(str, value)) + "]"
    return "true" if value == "True" else str(value)
