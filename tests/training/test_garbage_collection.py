"""What a run keeps to its end is not looked at again by every garbage collection."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.harness import ENTRY, ROOT, launch

COUNTING = """
import atexit, gc, runpy
atexit.register(lambda: print("lasting", gc.get_freeze_count(), "others", len(gc.get_objects())))
gc.unfreeze()
runpy.run_path({!r}, run_name="__main__")
"""
TINY = ["--yaml-cfg", str(ROOT / "examples" / "presets" / "tiny.yaml"), "--train-iters", "4"]


def test_a_later_collection_looks_at_a_small_part_of_the_objects(tmp_path: Path) -> None:
    script = tmp_path / "counting.py"
    script.write_text(COUNTING.format(str(ENTRY)))
    (outcome,) = launch(TINY, 1, scripts={0: script})

    assert outcome.code == 0, outcome.stderr
    words = outcome.stdout.split()
    lasting = int(words[words.index("lasting") + 1])
    others = int(words[words.index("others") + 1])
    assert lasting > 10 * others
