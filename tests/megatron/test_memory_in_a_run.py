"""What a rank holds while it trains: nothing that building the model has freed, no old records."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import pytest

from tests.commands import PRESETS
from tests.distributed.harness import changed_entry, launch_well

HAS_TRIM = hasattr(ctypes.CDLL(None), "malloc_trim")
COUNTING = f"""
import atexit, ctypes, gc
from pathlib import Path
from megatron.hetero.console import Console
from megatron.hetero.metrics import IterationRecord
from megatron.hetero.trainer import Trainer
gc.unfreeze()
atexit.register(lambda: print("lasting", gc.get_freeze_count(), "others", len(gc.get_objects())))
advance, train = Console.advance, Trainer.train
def counting(self, record):
    print("records", sum(isinstance(found, IterationRecord) for found in gc.get_objects()))
    advance(self, record)
def resident():
    return 4 * int(Path("/proc/self/statm").read_text().split()[1])
def trimming(self, *words):
    before = resident()
    ctypes.CDLL(None).malloc_trim(0)
    print("freed", max(0, before - resident()), "KiB")
    train(self, *words)
Console.advance = counting
if {HAS_TRIM}:
    Trainer.train = trimming
"""
TINY = ["--yaml-cfg", str(PRESETS / "tiny.yaml"), "--train-iters", "4", "--log-interval", "1"]
LAYERS = "--num-layers 6 --hidden-size 512 --ffn-hidden-size 1408".split()


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, int]]:
    """What a run has counted of itself, in the order of time."""
    entry = changed_entry(tmp_path_factory.mktemp("entry"), COUNTING)
    (said,) = launch_well([*TINY, *LAYERS], 1, scripts={0: entry})
    return [(word, int(after)) for word, after in pairwise(said.split()) if after.isdecimal()]


@pytest.mark.skipif(not HAS_TRIM, reason="needs glibc")
def test_what_the_initial_weights_were_drawn_in_is_given_back(counts) -> None:
    """Else a rank holds tens of megabytes to its end that nothing uses and no plan counts."""
    assert dict(counts)["freed"] < 4 << 10


def test_a_later_garbage_collection_visits_few_objects_and_no_old_records(
    counts,
) -> None:
    """A million records would take most of a gigabyte on every rank."""
    counted = dict(counts)
    assert counted["lasting"] > 10 * counted["others"]
    assert [count for word, count in counts if word == "records"] == [1] * 4
