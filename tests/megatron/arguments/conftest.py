"""The smallest launch (launches.py), accepted or refused with the flags that a test adds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hetero.errors import UserError
from tests.megatron.launches import parsed

Parse = Callable[..., Any]
Refusal = Callable[..., str]


@pytest.fixture
def parse() -> Parse:
    return parsed


@pytest.fixture
def refusal() -> Refusal:
    """The sentences with which such a launch is refused, a line each."""

    def refuse(flags: str = "", **how: Any) -> str:
        with pytest.raises(UserError) as error:
            parsed(flags, **how)
        assert error.value.exit_code == 2
        sentences = getattr(error.value, "sentences", (str(error.value),))
        assert not any("\n" in sentence for sentence in sentences)
        return "\n".join(sentences)

    return refuse
