"""What megatron-core's import is spared."""

import os

import pytest
import torch

from megatron.hetero.import_core import import_megatron_core

THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


@pytest.mark.parametrize(
    ("cuda", "set_by_hand", "expected"),
    [("13.0", None, "1"), ("13.0", "8", "8"), (None, None, None)],
)
def test_a_rank_on_a_gpu_compiles_in_its_own_process(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, set_by_hand: str | None, expected: str | None
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setenv(THREADS, set_by_hand or "")
    if set_by_hand is None:
        monkeypatch.delenv(THREADS)
    import_megatron_core()
    assert os.environ.get(THREADS) == expected
