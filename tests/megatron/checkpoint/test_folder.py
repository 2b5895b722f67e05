"""The folder of checkpoints: its tracker, what is tried first, and what a kill leaves behind."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero.errors import UserError
from megatron.hetero.checkpoint import folder
from megatron.hetero.checkpoint.index import INDEX_FILE


def finished(save: Path, *iterations: int) -> None:
    for iteration in iterations:
        path = save / folder.folder_name(iteration)
        path.mkdir(parents=True)
        (path / INDEX_FILE).write_text(str(iteration))


def names(save: Path) -> list[str]:
    return sorted(path.name for path in save.iterdir())


def test_a_save_appears_whole_and_the_tracker_names_it(tmp_path: Path) -> None:
    temporary = folder.begin(tmp_path, folder.folder_name(10))
    assert temporary.name == "iter_0000010.saving"
    assert folder.candidates(tmp_path) == []
    (temporary / INDEX_FILE).write_text("x")
    final = folder.commit(temporary)
    assert final == tmp_path / "iter_0000010"
    assert names(tmp_path) == ["iter_0000010", folder.TRACKER]
    assert (tmp_path / folder.TRACKER).read_text() == "10"


def test_saving_an_iteration_again_replaces_it(tmp_path: Path) -> None:
    finished(tmp_path, 10)
    temporary = folder.begin(tmp_path, folder.folder_name(10))
    (temporary / INDEX_FILE).write_text("new")
    folder.commit(temporary)
    assert (tmp_path / "iter_0000010" / INDEX_FILE).read_text() == "new"
    assert names(tmp_path) == ["iter_0000010", folder.TRACKER]


def test_the_next_save_removes_what_dead_ones_left(tmp_path: Path) -> None:
    finished(tmp_path, 10)
    for name in ("iter_0000020.saving", "iter_0000005.removing"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").write_text("x")
    (tmp_path / "notes.saving").mkdir()
    folder.begin(tmp_path, folder.folder_name(30))
    assert names(tmp_path) == ["iter_0000010", "iter_0000030.saving", "notes.saving"]


def restore_unused(load: Path) -> None:
    folder.restore_replaced(load, in_use=lambda: False)


@pytest.mark.parametrize("undo", [folder.recover, restore_unused])
def test_a_replacement_that_a_kill_interrupted_is_undone(tmp_path: Path, undo) -> None:
    finished(tmp_path, 10)
    (tmp_path / "iter_0000010").rename(tmp_path / "iter_0000010.replaced")
    undo(tmp_path)
    assert names(tmp_path) == ["iter_0000010"]


def test_a_replacement_under_way_is_left_to_the_run_that_makes_it(tmp_path: Path) -> None:
    (tmp_path / "iter_0000010.replaced").mkdir()
    folder.restore_replaced(tmp_path, in_use=lambda: True)
    assert names(tmp_path) == ["iter_0000010.replaced"]


def test_a_replacement_that_was_done_is_cleaned_up(tmp_path: Path) -> None:
    finished(tmp_path, 10)
    (tmp_path / "iter_0000010.replaced").mkdir()
    folder.recover(tmp_path)
    assert names(tmp_path) == ["iter_0000010"]


@pytest.mark.parametrize(
    ("iterations", "tracker", "candidates"),
    [
        ((10, 20, 30), "20", [20, 10]),
        # Without one that can be read the newest is tried.
        *(((10, 20), text, [20, 10]) for text in (None, "", "twenty", "\x00")),
        # One that names nothing is tried, so that it can be said.
        ((10,), "20", [20, 10]),
        ((), None, []),
    ],
)
def test_the_trackers_checkpoint_is_tried_first_and_then_those_before_it(
    tmp_path: Path, iterations: tuple[int, ...], tracker: str | None, candidates: list[int]
) -> None:
    finished(tmp_path, *iterations)
    if tracker is not None:
        (tmp_path / folder.TRACKER).write_text(tracker)
    assert folder.candidates(tmp_path) == [folder.folder_name(number) for number in candidates]
    assert folder.candidates(tmp_path / "absent") == []


def test_a_tracker_that_passes_over_newer_ones_is_said(tmp_path: Path) -> None:
    finished(tmp_path, 10, 20, 30)
    assert folder.notes_on_newest(tmp_path) == []
    folder.write_tracker(tmp_path, "30")
    assert folder.notes_on_newest(tmp_path) == []
    folder.write_tracker(tmp_path, "20")
    (note,) = folder.notes_on_newest(tmp_path)
    assert note.startswith(f"iter_0000030 in {tmp_path} is newer and not used")
    (tmp_path / folder.TRACKER).write_text("twenty")
    (note,) = folder.notes_on_newest(tmp_path)
    assert "cannot be read" in note


@pytest.mark.parametrize(
    ("newest", "kept", "left"),
    [
        (50, {}, [10, 20, 30, 40, 50]),
        (50, {"keep_last": 2}, [40, 50]),
        (40, {"keep_last": 2}, [30, 40, 50]),  # never one that is newer
        (50, {"retain_interval": 30}, [10, 20, 30, 50]),  # only the one before
        (50, {"retain_interval": 20}, [10, 20, 30, 40, 50]),
        (50, {"keep_last": 2, "retain_interval": 30}, [30, 40, 50]),
    ],
)
def test_what_is_pruned(tmp_path: Path, newest: int, kept: dict[str, int], left: list[int]) -> None:
    finished(tmp_path, 10, 20, 30, 40, 50)
    prune(tmp_path, newest, **kept)
    assert names(tmp_path) == [folder.folder_name(number) for number in left]


def test_a_link_to_a_checkpoint_is_not_removed(tmp_path: Path) -> None:
    finished(tmp_path / "elsewhere", 10)
    (tmp_path / "iter_0000010").symlink_to(tmp_path / "elsewhere" / "iter_0000010")
    finished(tmp_path, 20)
    prune(tmp_path, 20, keep_last=1)
    assert names(tmp_path) == ["elsewhere", "iter_0000010", "iter_0000020"]


def test_one_without_an_index_does_not_count(tmp_path: Path) -> None:
    finished(tmp_path, 10, 20, 30)
    (tmp_path / "iter_0000020" / INDEX_FILE).unlink()
    prune(tmp_path, 30, keep_last=2)
    assert names(tmp_path) == ["iter_0000010", "iter_0000030"]


@pytest.fixture
def unremovable(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Keeps what such a folder holds, as NFS does while somebody reads it."""
    remove, kept = shutil.rmtree, []

    def refusing(path: Path, ignore_errors: bool = False) -> None:
        if Path(path).name not in kept:
            remove(path, ignore_errors=ignore_errors)
        elif not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr(shutil, "rmtree", refusing)
    return kept.append


def test_one_that_cannot_be_removed_is_named_and_keeps_no_other_from_going(
    tmp_path: Path, unremovable: Callable[[str], None]
) -> None:
    finished(tmp_path, 10, 20, 30)
    unremovable("iter_0000020.removing")
    failures = folder.prune(tmp_path, newest=30, keep_last=1, retain_interval=None)
    assert failures == ["iter_0000020.removing (Directory not empty)"]
    assert names(tmp_path) == ["iter_0000020.removing", "iter_0000030"]
    assert folder.iterations(tmp_path) == [30]


def test_what_cannot_be_removed_stops_no_later_save(
    tmp_path: Path, unremovable: Callable[[str], None]
) -> None:
    finished(tmp_path, 10)
    (tmp_path / "iter_0000005.removing").mkdir()
    unremovable("iter_0000005.removing")
    unremovable("iter_0000010.removing")
    for _ in range(2):
        folder.commit(folder.begin(tmp_path, folder.folder_name(10)))
    assert (tmp_path / folder.TRACKER).read_text() == "10"
    assert folder.candidates(tmp_path) == ["iter_0000010"]


def test_the_rest_of_the_same_save_has_to_go(
    tmp_path: Path, unremovable: Callable[[str], None]
) -> None:
    (tmp_path / "iter_0000010.saving").mkdir()
    unremovable("iter_0000010.saving")
    with pytest.raises(OSError, match="Directory not empty"):
        folder.begin(tmp_path, folder.folder_name(10))


def prune(save: Path, newest: int, **kept: int | None) -> None:
    folder.prune(save, newest=newest, **{"keep_last": None, "retain_interval": None} | kept)


def test_a_save_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"--save .*file/inside cannot be written"):
        folder.check_save_folder(tmp_path / "file" / "inside")
    folder.check_save_folder(tmp_path / "new" / "one")
    assert names(tmp_path / "new" / "one") == []
