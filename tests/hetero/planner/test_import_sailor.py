"""Sailor's profile files, damaged; whole ones are in tests/bench/test_validate_planner.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero.planner.import_sailor import import_sailor, inter_node_link, intra_node_link
from hetero.planner.layer_profile import ProfileError
from hetero.planner.model_shape import ModelShape
from tests.bench.sailor_checkout import ZONE, write_checkout

_TIMES = "Planner/simulations/profiles_tmp.json"
_SIZES = "Planner/llm_info.json"
_INSIDE = "providers/intra_node_bandwidths.json"
_BETWEEN = "providers/multizone_bandwidths_het.json"
_MODEL = ModelShape(
    layers=24,
    hidden=1024,
    ffn=4096,
    heads=16,
    query_groups=16,
    head_size=64,
    vocabulary=50304,
    seq_length=2048,
    gated=False,
    tied=False,
)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (_TIMES, []),
        (_TIMES, {"OPT-350": {"A": {"1": {"1": {"0": [1.0]}}}}}),
        (_TIMES, {"OPT-350": {"A": {"1": {"1": {str(n): [-1.0, 1.0, 1.0] for n in range(26)}}}}}),
        (_SIZES, {"OPT-350": {"1": {"0": {}}}}),
        (_INSIDE, {"A": {"2": [[]]}}),
        (_BETWEEN, {ZONE: {"A": {"1": None}}}),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, file: str, content: Any) -> None:
    folder = write_checkout(tmp_path, kinds=("A",)) / "sailor"
    (folder / file).write_text(json.dumps(content))
    readers = {
        _INSIDE: lambda: intra_node_link(folder, "A", 2),
        _BETWEEN: lambda: inter_node_link(folder, "A", 1, zone=ZONE),
    }
    with pytest.raises(ProfileError, match=file.partition("/")[0]):
        readers.get(file, lambda: import_sailor(folder, "OPT-350", _MODEL))()
