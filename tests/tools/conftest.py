"""What a tool says of bad input."""

from __future__ import annotations

from functools import partial

import pytest

from tests.tools.refusals import Refused, refusal


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """The sentence with which a program, here its `main`, refuses words."""
    return partial(refusal, capsys)
