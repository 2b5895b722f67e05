"""Handles of calls."""

from __future__ import annotations

import pytest
import torch

from hetero.collectives.work import CoalescedWork, CollectiveWork


def test_the_future_of_a_coalesced_call_fails_with_the_first_of_its_calls_that_did() -> None:
    works = [CollectiveWork("a call", [torch.ones(1)], timeout=1.0, group="0") for _ in range(3)]
    future = CoalescedWork(works).get_future()
    for work, error in zip(works, (None, RuntimeError("cause"), RuntimeError("more")), strict=True):
        work.finish(error)
    with pytest.raises(RuntimeError, match="cause"):
        future.wait()
