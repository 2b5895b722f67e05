"""A context is open during one pass of a module, and cannot end that pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch

from megatron.hetero.first_pass import FirstPass


@pytest.fixture
def module() -> torch.nn.Module:
    return torch.nn.Identity()


def test_it_is_open_during_the_first_pass_alone(module: torch.nn.Module) -> None:
    seen: list[str] = []

    @contextmanager
    def opened() -> Iterator[None]:
        seen.append("opened")
        yield
        seen.append("closed")

    with ExitStack() as undo:
        FirstPass(module, opened, failed=lambda _: None, undo=undo)
        module.register_forward_hook(lambda *_: seen.append("pass"))
        module(torch.ones(1))
        module(torch.ones(1))
    assert sorted(seen[:3]) == ["closed", "opened", "pass"]
    assert seen[3:] == ["pass"]


def test_a_context_that_cannot_be_opened_is_told_and_the_pass_goes_on(
    module: torch.nn.Module,
) -> None:
    told: list[Exception] = []

    @contextmanager
    def opened() -> Iterator[None]:
        raise AttributeError("no such module")
        yield

    with ExitStack() as undo:
        FirstPass(module, opened, failed=told.append, undo=undo)
        assert torch.equal(module(torch.ones(1)), torch.ones(1))
    assert [str(error) for error in told] == ["no such module"]
    assert not module._forward_pre_hooks
    assert not module._forward_hooks
