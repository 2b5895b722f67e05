"""SwiGLU is liger-kernel's where an installed version has it."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from megatron.training.fused import swiglu
from megatron.training.fused.swiglu import LigerSwiGLU

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
    install(monkeypatch, LigerFusedGateUpSiLUMulFunction=Doubled)
    assert swiglu.is_available()


def test_a_liger_kernel_from_before_it_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, LigerSiLUMulFunction=Doubled)
    assert not swiglu.is_available()


def test_without_liger_kernel_it_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)
    assert not swiglu.is_available()


def test_it_takes_what_megatron_core_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, LigerFusedGateUpSiLUMulFunction=Doubled)
    assert LigerSwiGLU.apply(torch.ones(2), False, False).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("stored", [(True, False), (False, True)], ids=["fp8", "offloaded"])
def test_another_place_for_its_input_is_refused(stored: tuple[bool, bool]) -> None:
    with pytest.raises(NotImplementedError, match="keeps its input as it is"):
        LigerSwiGLU.apply(torch.ones(2), *stored)
