"""Training begins without the memory that building the model has freed."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from tests.commands import PRESETS
from tests.distributed.harness import changed_entry, launch_well

TRIMMED_ONCE_MORE = """
import ctypes
from pathlib import Path
from megatron.training.trainer import Trainer
train = Trainer.train
def resident():
    return 4 * int(Path("/proc/self/statm").read_text().split()[1])
def trimming(self, *words):
    before = resident()
    ctypes.CDLL(None).malloc_trim(0)
    print("freed", before - resident(), "KiB")
    train(self, *words)
Trainer.train = trimming
"""
LAYERS = "--num-layers 6 --hidden-size 512 --ffn-hidden-size 1408 --train-iters 3".split()
TINY = ["--yaml-cfg", str(PRESETS / "tiny.yaml"), *LAYERS]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_what_the_initial_weights_were_drawn_in_is_given_back(tmp_path: Path) -> None:
    """Else a rank holds tens of megabytes to its end that nothing uses and no plan counts."""
    (said,) = launch_well(TINY, 1, scripts={0: changed_entry(tmp_path, TRIMMED_ONCE_MORE)})
    freed = said.partition("freed ")[2].partition(" KiB")[0]
    assert int(freed) < 4 << 10
