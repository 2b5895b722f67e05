"""What is said of input that is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from hetero.errors import UserError


def without_time(text: str) -> str:
    """A log without the time with which its lines begin."""
    return re.sub(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] ", "", text, flags=re.MULTILINE)


def sentence_of(refuses: Callable[..., object], *arguments: Any, **named: Any) -> str:
    """The one sentence with which a function refuses these arguments."""
    said = all_said_of(refuses, *arguments, **named)
    assert "\n" not in said
    return said


def all_said_of(
    refuses: Callable[..., object],
    *arguments: Any,
    error: type[Exception] = UserError,
    **named: Any,
) -> str:
    """All that a function says is wrong with these arguments."""
    with pytest.raises(error) as raised:
        refuses(*arguments, **named)
    return str(raised.value)
