"""megatron-core on the CPU: `cuda` means the CPU inside the context and nowhere else."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank
from megatron.core.tensor_parallel import random as core_random

from megatron.hetero.cpu_shim import cpu_shim

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the shim does nothing where there is an accelerator"
)

CPU = torch.device("cpu")
# Called from a file of megatron-core, as far as Python can tell.
CORE_FILE = "/somewhere/megatron/core/optimizer.py"


def _patched() -> list[Any]:
    return [
        torch.cuda.current_device,
        torch.cuda.current_stream,
        torch.cuda.synchronize,
        torch.cuda.empty_cache,
        torch.cuda.set_device,
        torch.cuda.get_rng_state,
        torch.cuda.set_rng_state,
        torch.cuda.manual_seed,
        torch.cuda.nvtx.range_push,
        torch.cuda.nvtx.range_pop,
        core_random._set_cuda_rng_state,
        core_random._get_cuda_rng_state,
    ]


def _type_name_in(filename: str) -> str:
    names: dict[str, Any] = {"tensor": torch.ones(1)}
    exec(compile("name = tensor.type()", filename, "exec"), names)
    return str(names["name"])


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_before_when_the_body_ends_or_fails(fails: bool) -> None:
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    logger.setLevel(logging.INFO)
    before = _patched()
    with contextlib.suppress(KeyError), cpu_shim():
        assert all(now is not then for now, then in zip(_patched(), before, strict=True))
        assert not logger.isEnabledFor(logging.WARNING)
        if fails:
            raise KeyError
    assert _patched() == before
    assert logger.level == logging.INFO
    assert _type_name_in(CORE_FILE) == "torch.FloatTensor"
    with pytest.raises((RuntimeError, AssertionError)):
        torch.ones(1).cuda()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.ones(1, device="cuda")


def test_a_shim_that_cannot_be_installed_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with a torch that no longer has one of the functions."""
    before = torch.cuda.current_device
    monkeypatch.delattr(torch.cuda.nvtx, "range_pop")
    try:
        with pytest.raises(AttributeError), cpu_shim():
            pass
        assert torch.cuda.current_device is before
    finally:
        mock.patch.stopall()


def test_contexts_can_be_nested() -> None:
    with cpu_shim():
        with cpu_shim():
            assert torch.ones(1, device="cuda").device == CPU
        assert torch.ones(1, device="cuda").device == CPU


@pytest.mark.parametrize(
    "place",
    [
        lambda: torch.ones(2, device="cuda:3"),
        lambda: torch.ones(2, device=torch.device("cuda", 1)),
        lambda: torch.ones(2, device=torch.cuda.current_device()),
        lambda: torch.ones(2, device=0),
        lambda: torch.empty_like(torch.ones(2), device="cuda"),
        lambda: torch.ones(2).cuda(non_blocking=True),
        lambda: torch.ones(2).to("cuda"),
        lambda: torch.ones(2).to(device="cuda"),
        lambda: torch.ones(2).to(torch.device("cuda"), torch.float64),
        lambda: torch.ones(2).to("cpu"),
        lambda: torch.nn.Linear(1, 2).cuda().weight,
    ],
)
def test_cuda_means_the_cpu(place: Callable[[], torch.Tensor]) -> None:
    with cpu_shim():
        assert place().device == CPU


@pytest.mark.parametrize("inside", [nullcontext(), torch.device("cpu")], ids=["", "of a device"])
def test_megatron_core_asks_for_pinned_memory_and_gets_any(
    inside: AbstractContextManager[object],
) -> None:
    """Positions of yarn are made `with torch.device(...)`, which handles torch's functions too."""
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    with cpu_shim(), inside:
        rows = get_pos_emb_on_this_cp_rank(torch.arange(8)[:, None], 0, group)
    assert rows.flatten().tolist() == [2, 3, 4, 5]
    with cpu_shim(), inside, pytest.raises(RuntimeError, match="pin"):
        torch.ones(1, pin_memory=True)


def test_the_random_state_of_the_gpu_is_that_of_the_cpu() -> None:
    with cpu_shim():
        torch.cuda.manual_seed(5)
        state = torch.cuda.get_rng_state()
        first = torch.rand(3)
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(3), first)


def test_a_stream_of_the_cpu_has_nothing_to_wait_for() -> None:
    """megatron-core 0.19 asks for the stream whenever it reduces gradients."""
    with cpu_shim():
        stream = torch.cuda.current_stream()
        stream.wait_event(None)
        stream.wait_stream(torch.cuda.current_stream(CPU))
        assert isinstance(stream, torch.cpu.Stream)


def test_only_megatron_core_sees_type_names_of_cuda() -> None:
    """It compares them; anyone else gets the truth."""
    tensor = torch.ones(1)
    with cpu_shim():
        assert _type_name_in(CORE_FILE) == "torch.cuda.FloatTensor"
        assert _type_name_in("/somewhere/else.py") == "torch.FloatTensor"
        assert tensor.type(torch.float64).dtype == torch.float64
        assert tensor.cuda() is tensor
