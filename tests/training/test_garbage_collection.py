"""What a run keeps to its end is not looked at again by every garbage collection."""

from __future__ import annotations

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
