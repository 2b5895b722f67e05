"""SwiGLU is liger-kernel's where an installed version has it."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from megatron.hetero.fused import swiglu
from megatron.hetero.fused.swiglu import LigerSwiGLU

MODULE = "liger_kernel.ops.swiglu"


class Doubled:
    """Stands in for liger-kernel's function."""

    @staticmethod
    def apply(gate_up: torch.Tensor) -> torch.Tensor:
        return 2 * gate_up


def install(monkeypatch: pytest.MonkeyPatch, **contents: object) -> None:
    """A simulated liger-kernel that has `contents` and nothing else."""
    for name in ("liger_kernel", "liger_kernel.ops", MODULE):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules[MODULE]).update(contents)


def test_it_is_available_where_liger_kernel_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)
    assert not swiglu.is_available()
    install(monkeypatch, LigerSiLUMulFunction=Doubled)  # one from before it
    assert not swiglu.is_available()
    install(monkeypatch, LigerFusedGateUpSiLUMulFunction=Doubled)
    assert swiglu.is_available()
    # It takes what megatron-core passes.
    assert LigerSwiGLU.apply(torch.ones(2), False, False).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("stored", [(True, False), (False, True)], ids=["fp8", "offloaded"])
def test_another_place_for_its_input_is_refused(stored: tuple[bool, bool]) -> None:
    with pytest.raises(NotImplementedError, match="keeps its input as it is"):
        LigerSwiGLU.apply(torch.ones(2), *stored)
