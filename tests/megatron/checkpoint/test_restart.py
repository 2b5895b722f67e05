"""What a restart resumes from: its own memory or saves, whichever is newer, and nobody else's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hetero.errors import UserError
from hetero.recover.node_state import file_identity
from megatron.hetero.checkpoint import folder
from megatron.hetero.checkpoint.find_checkpoint import FoundCheckpoint, find_checkpoint
from megatron.hetero.checkpoint.restart import Restart
from tests.megatron.checkpoint.test_find_checkpoint import alone, checkpoint, chosen, flags
from tests.sentences import sentence_of


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HETERO_RESUME_FOLDER", str(tmp_path / "memory"))
    monkeypatch.setenv("HETERO_JOB_ID", "mine")
    return tmp_path / "memory"


def saves(path: Path, *iterations: int, job: str = "mine") -> Path:
    for iteration in iterations:
        checkpoint(path, iteration, job=job)
    return path


def place(found: FoundCheckpoint) -> tuple[str, int]:
    return found.folder.parent.name, found.index.iteration


@pytest.mark.parametrize(
    ("in_memory", "on_disk", "expected"),
    [
        ((10, 20), (5,), ("memory", 20)),
        ((10, 20), (), ("memory", 20)),
        ((10,), (20,), ("disk", 20)),
        ((), (20,), ("disk", 20)),
        ((20,), (20,), ("memory", 20)),
    ],
)
def test_the_newer_of_memory_and_disk_is_taken_and_said(
    memory: Path, tmp_path: Path, in_memory: Any, on_disk: Any, expected: tuple[str, int]
) -> None:
    saves(memory, *in_memory)
    disk = saves(tmp_path / "disk", *on_disk)
    found = chosen(flags(None, save=str(disk)))
    assert place(found) == expected
    assert f"resumed from iteration {expected[1]} " in found.notes[0]
    assert not found.sources.is_new_run


def test_without_save_memory_alone_is_enough(memory: Path) -> None:
    saves(memory, 20)
    assert place(chosen(flags(None, save=None))) == ("memory", 20)


def test_a_generation_without_all_files_does_not_count(memory: Path) -> None:
    saves(memory, 10, 20)
    (memory / "iter_0000020" / "rank_00000.safetensors").unlink()
    assert place(chosen(flags(None, save=None))) == ("memory", 10)


def test_a_damaged_generation_is_named_and_the_next_is_taken(memory: Path, tmp_path: Path) -> None:
    saves(memory, 10, 20)
    disk = saves(tmp_path / "disk", 15)
    part = memory / "iter_0000020" / "rank_00000.safetensors"
    part.write_bytes(bytes(part.stat().st_size))
    found = chosen(flags(None, save=str(disk)))
    assert place(found) == ("disk", 15)
    assert (
        "state in memory of iteration 20 is not used: rank_00000.safetensors has other"
        in (found.notes[0])
    )


def test_a_restart_whose_state_is_all_damaged_does_not_begin_anew(memory: Path) -> None:
    saves(memory, 20)
    part = memory / "iter_0000020" / "rank_00000.safetensors"
    part.write_bytes(bytes(part.stat().st_size))
    said = sentence_of(find, flags(None, save=None), error=UserError)
    assert "nothing that this job has saved can be used" in said


def test_a_restart_for_which_launchers_have_found_state_does_not_begin_anew(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves(memory, 20)
    (memory / "iter_0000020" / "rank_00000.safetensors").unlink()
    monkeypatch.setenv("HETERO_RESUME_ITERATION", "20")
    said = sentence_of(find, flags(None, save=None), error=UserError)
    host = os.uname().nodename
    assert said.startswith("the state in memory of iteration 20, from which this job has to resume")
    assert f", is not whole for rank 0 on {host}" in said
    disk = saves(tmp_path / "disk", 15)
    assert place(chosen(flags(None, save=str(disk)))) == ("disk", 15)


def test_launchers_are_told_of_damage_and_not_of_what_cannot_be_read(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves(memory, 20)
    part = memory / "iter_0000020" / "rank_00000.safetensors"
    said = memory / "damaged.txt"
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", lambda *_: _raise(OSError(12, "Cannot allocate memory")))
        assert "Cannot allocate" in sentence_of(find, flags(None, save=None), error=UserError)
    assert not said.exists()
    part.write_bytes(bytes(part.stat().st_size))
    sentence_of(find, flags(None, save=None), error=UserError)
    assert said.read_text().split() == [file_identity(part)]


def _raise(error: Exception) -> None:
    raise error


def find(args: Any) -> Any:
    return find_checkpoint(args, alone, rank=0, world_size=1)


def test_what_another_job_has_saved_is_not_taken_for_this_ones(
    memory: Path, tmp_path: Path
) -> None:
    disk = saves(tmp_path / "disk", 50, job="other")
    found = find(flags(None, save=str(disk)))
    assert "it begins as its flags say" in found.notes[0]
    assert found.train_state.iteration == 0
    saves(disk, 30)
    folder.write_tracker(disk, "50")
    assert place(chosen(flags(None, save=str(disk)))) == ("disk", 30)


def test_a_job_that_loads_what_another_has_saved_there_does_so_again(
    memory: Path, tmp_path: Path
) -> None:
    disk = saves(tmp_path / "disk", 50, job="other")
    assert place(chosen(flags(disk, save=str(disk)))) == ("disk", 50)


def test_a_job_that_began_from_weights_alone_continues_and_does_not_begin_again(
    memory: Path, tmp_path: Path
) -> None:
    base = saves(tmp_path / "base", 900, job="other")
    saves(memory, 20)
    found = chosen(flags(base, save=None, finetune=True, ckpt_step=900, no_load_optim=True))
    assert place(found) == ("memory", 20)
    assert found.train_state.iteration == 20
    assert found.schedule_position > 0


def test_before_its_first_save_a_restart_does_what_the_first_start_did(
    memory: Path, tmp_path: Path
) -> None:
    base = saves(tmp_path / "base", 900, job="other")
    found = chosen(flags(base, save=str(tmp_path / "disk"), finetune=True))
    assert place(found) == ("base", 900)
    assert found.sources.is_new_run


def test_a_first_start_looks_at_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HETERO_RESUME_FOLDER", raising=False)
    assert Restart.of() is None


def test_nodes_agree_on_what_all_of_them_have(tmp_path: Path) -> None:
    """Generations of the same iteration, of two attempts, are different ones."""
    restart = Restart(tmp_path, "mine")
    memory = [[[10, "a"], [20, "b"], [30, "c"]], [[10, "a"], [20, "other"]]]
    records = [{"memory": one, "disk": [5]} for one in memory]
    found = restart.candidates(records, "disk")
    assert [(one.iteration, one.in_memory) for one in found] == [(10, True), (5, False)]
