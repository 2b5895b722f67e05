"""Variables of this project that are misspelt."""

from __future__ import annotations

import re

import pytest

from hetero.environment import NAMES, PREFIX, unknown_variables
from tests.commands import ROOT


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        (dict.fromkeys(NAMES, "nccl"), []),
        ({"HETERO_TEST_OUT": "x", "OTHER": "y", "HETERO_INSTEAD_OF": "nccl, gloo"}, []),
        ({"HETERO_VENDER": "amd"}, ["HETERO_VENDER is no variable .*did you mean HETERO_VENDOR"]),
        ({"HETERO_XYZ": ""}, ["HETERO_XYZ is no variable of this project; there are HETERO_VEND"]),
        (
            {"HETERO_INSTEADOF": "gloo", "HETERO_INSTEAD_OF": "nccl,glo"},
            ["did you mean HETERO_INSTEAD_OF", "names glo, which .*did you mean gloo"],
        ),
    ],
)
def test_a_name_that_nothing_reads_is_told_with_the_nearest(
    environ: dict[str, str], told: list[str]
) -> None:
    found = list(unknown_variables(environ))
    assert len(found) == len(told)
    assert all(re.search(pattern, line) for pattern, line in zip(told, found, strict=True))


def test_every_variable_that_the_program_reads_is_known() -> None:
    """By its name in quotes, in Python and in C."""
    read: set[str] = set()
    for folder in ("hetero", "megatron", "bench"):
        for file in (ROOT / folder).rglob("*.[pc]*"):
            if file.suffix in (".py", ".c"):
                read |= set(re.findall(rf'"({PREFIX}[A-Z_]+)"', file.read_text()))
    assert {name for name in read if not name.startswith("HETERO_TEST_")} == set(NAMES)
