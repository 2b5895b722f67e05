"""What megatron-core's import is spared."""

import os
import subprocess
import sys

import pytest
import torch

from megatron.hetero.import_core import import_megatron_core
from tests.commands import ROOT

THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


@pytest.mark.parametrize(
    ("has_gpu", "set_by_hand", "expected"),
    [(True, None, "1"), (True, "8", "8"), (False, None, None)],
)
def test_a_rank_on_a_gpu_compiles_in_its_own_process(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, set_by_hand: str | None, expected: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setenv(THREADS, set_by_hand or "")
    if set_by_hand is None:
        monkeypatch.delenv(THREADS)
    import_megatron_core()
    assert os.environ.get(THREADS) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_nothing_is_compiled_without_a_gpu_whatever_torch_was_built_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The compiler cannot trace what the shim replaces."""
    script = (
        "import sys, torch; torch.version.cuda = '13.0'\n"
        "from megatron.hetero.import_core import import_megatron_core; import_megatron_core()\n"
        "from megatron.core.fusions.fused_bias_swiglu import swiglu\n"
        "assert not hasattr(swiglu, '_torchdynamo_orig_callable'), swiglu\n"
        "assert 'torch._inductor' not in sys.modules\n"
    )
    monkeypatch.delenv(THREADS, raising=False)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
