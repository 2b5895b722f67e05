"""What a run keeps to its end is not looked at again by every garbage collection."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from tests.commands import PRESETS
from tests.distributed.harness import changed_entry, launch_well

COUNTING = """
import atexit, gc
from megatron.training.console import Console
from megatron.training.metrics import IterationRecord
gc.unfreeze()
atexit.register(lambda: print("lasting", gc.get_freeze_count(), "others", len(gc.get_objects())))
advance = Console.advance
def counting(self, record):
    print("records", sum(isinstance(found, IterationRecord) for found in gc.get_objects()))
    advance(self, record)
Console.advance = counting
"""
TINY = ["--yaml-cfg", str(PRESETS / "tiny.yaml"), "--train-iters", "4"]


def test_a_later_collection_looks_at_few_objects_and_at_no_record_of_an_earlier_iteration(
    tmp_path: Path,
) -> None:
    """A million records would take most of a gigabyte on every rank."""
    flags, entry = [*TINY, "--log-interval", "1"], changed_entry(tmp_path, COUNTING)
    (said,) = launch_well(flags, 1, scripts={0: entry})
    counts = [(word, int(after)) for word, after in pairwise(said.split()) if after.isdecimal()]
    counted = dict(counts)
    assert counted["lasting"] > 10 * counted["others"]
    assert [count for word, count in counts if word == "records"] == [1] * 4
