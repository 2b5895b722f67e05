"""What a run keeps to its end is not looked at again by every garbage collection."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from tests.distributed.harness import ROOT, changed_entry, launch_well

COUNTING = """
import atexit, gc
atexit.register(lambda: print("lasting", gc.get_freeze_count(), "others", len(gc.get_objects())))
gc.unfreeze()
"""
TINY = ["--yaml-cfg", str(ROOT / "examples" / "presets" / "tiny.yaml"), "--train-iters", "4"]


def test_a_later_collection_looks_at_a_small_part_of_the_objects(tmp_path: Path) -> None:
    (said,) = launch_well(TINY, 1, scripts={0: changed_entry(tmp_path, COUNTING)})
    words = said.split()
    lasting = int(words[words.index("lasting") + 1])
    others = int(words[words.index("others") + 1])
    assert lasting > 10 * others


COUNTING_RECORDS = """
import gc
from megatron.training.console import Console
from megatron.training.metrics import IterationRecord
advance = Console.advance
def counting(self, record):
    gc.unfreeze()
    print("records", sum(isinstance(found, IterationRecord) for found in gc.get_objects()))
    advance(self, record)
Console.advance = counting
"""


def test_a_run_keeps_no_record_of_each_iteration(tmp_path: Path) -> None:
    """A million of them would take most of a gigabyte on every rank."""
    flags, entry = [*TINY, "--log-interval", "1"], changed_entry(tmp_path, COUNTING_RECORDS)
    (said,) = launch_well(flags, 1, scripts={0: entry})
    words = said.split()
    counts = [int(after) for word, after in pairwise(words) if word == "records"]
    assert counts == [1] * 4
