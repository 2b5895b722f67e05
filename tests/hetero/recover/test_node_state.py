"""A node's folder of state: what is in it, and that none is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hetero.errors import UserError
from hetero.recover.node_state import Inventory, NodeState, remove_left_folders
from hetero.recover.stored_files import INDEX_FILE
from tests.commands import ROOT
from tests.hetero.recover.played_state import rank_file, write_generation
from tests.sentences import sentence_of


def nothing(text: str) -> None:
    raise AssertionError(text)


def test_a_folder_goes_with_its_launcher(tmp_path: Path) -> None:
    with NodeState.create(base=tmp_path, say=nothing) as state:
        assert state.folder.parent == tmp_path
        assert state.folder.stat().st_mode & 0o777 == 0o700
        write_generation(state.folder, 10, world=1, ranks=[0])
    assert list(tmp_path.iterdir()) == []


def test_a_node_says_which_generations_it_has_and_which_of_their_files(tmp_path: Path) -> None:
    with NodeState.create(base=tmp_path, say=nothing) as state:
        write_generation(state.folder, 10, world=2, ranks=[0])
        digest = write_generation(state.folder, 20, world=2, ranks=[0])
        write_generation(state.folder / "of_3", 20, world=2, ranks=[1])
        (state.folder / "iter_0000030.saving").mkdir()
        (state.folder / "iter_0000040").mkdir()
        newest, oldest = state.generations()
        assert (newest.iteration, newest.digest, oldest.iteration) == (20, digest, 10)
        assert newest.present == {rank_file(0)}
        assert set(newest.named) == {rank_file(0), rank_file(1)}
        inventory = state.inventory()
        assert [one.present for one in inventory.copies[3]] == [{rank_file(1)}]
        assert Inventory.from_record(inventory.to_record()) == inventory


def test_what_a_node_says_is_short_for_any_number_of_ranks(tmp_path: Path) -> None:
    with NodeState.create(base=tmp_path, say=nothing) as state:
        write_generation(state.folder, 10, world=1024, ranks=range(8, 16))
        write_generation(state.folder / "of_3", 10, world=1024, ranks=[0, 2])
        record = state.inventory().to_record()
        assert len(json.dumps(record)) < 1000
        assert Inventory.from_record(record) == state.inventory()


def test_a_file_cut_short_and_an_index_cut_short_do_not_count(tmp_path: Path) -> None:
    with NodeState.create(base=tmp_path, say=nothing) as state:
        write_generation(state.folder, 10, world=1, ranks=[0])
        write_generation(state.folder, 20, world=1, ranks=[0])
        (state.folder / "iter_0000010" / rank_file(0)).write_bytes(b"short")
        (state.folder / "iter_0000020" / INDEX_FILE).write_text("{")
        (left,) = state.generations()
        assert (left.iteration, left.present) == (10, frozenset())


KILLED = """
import sys, time
from pathlib import Path
from hetero.recover.node_state import NodeState
print(NodeState.create(base=Path(sys.argv[1]), say=print).folder, flush=True)
time.sleep(600)
"""


def test_what_a_killed_launcher_left_goes_with_the_next_and_a_living_ones_stays(
    tmp_path: Path,
) -> None:
    words = [sys.executable, "-c", KILLED, str(tmp_path)]
    launcher = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    said: list[str] = []
    try:
        folder = Path(launcher.stdout.readline().strip())
        remove_left_folders(tmp_path, say=said.append)
        assert (said, folder.is_dir()) == ([], True)
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.communicate(timeout=60)
    with NodeState.create(base=tmp_path, say=said.append) as state:
        assert list(tmp_path.iterdir()) == [state.folder]
    (line,) = said
    assert str(folder) in line


def test_where_no_folder_can_be_made_the_launcher_says_so(tmp_path: Path) -> None:
    if os.getuid() == 0:
        base = tmp_path / "file"
        base.write_text("")
    else:
        base = tmp_path / "closed"
        base.mkdir(mode=0o500)
    said = sentence_of(NodeState.create, base=base, say=nothing, error=UserError)
    assert "cannot keep state in memory in" in said
    assert str(base) in said


def test_a_host_without_shared_memory_is_warned_of_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero.recover.node_state._SHARED_MEMORY", tmp_path / "none")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    said: list[str] = []
    with NodeState.create(say=said.append) as state:
        assert state.folder.parent == tmp_path
    assert "which may be a disk" in said[0]


def test_ranks_are_told_where_their_state_is_and_after_a_restart_to_resume_from_it(
    tmp_path: Path,
) -> None:
    with NodeState.create(base=tmp_path, say=nothing) as state:
        folder = str(state.folder)
        first = {"HETERO_STATE_FOLDER": folder, "HETERO_STATE_COPIES": "1,3"}
        first["HETERO_JOB_ID"] = "job-1"
        assert state.variables(job="job-1", is_restart=False, copies_of=[1, 3]) == first
        nothing_whole = state.variables(job="job-1", is_restart=True, copies_of=[1, 3])
        assert nothing_whole == first | {"HETERO_RESUME_FOLDER": folder}
        again = state.variables(job="job-1", is_restart=True, chosen=20, copies_of=[1, 3])
        assert again == nothing_whole | {"HETERO_RESUME_ITERATION": "20"}


def test_copies_of_nodes_that_are_no_partners_any_more_are_removed(tmp_path: Path) -> None:
    with NodeState.create(base=tmp_path, say=nothing) as state:
        for node in (1, 2, 3):
            write_generation(state.folder / f"of_{node}", 10, world=2, ranks=[0])
        write_generation(state.folder, 10, world=2, ranks=[1])
        state.keep_copies([2])
        assert list(state.inventory().copies) == [2]
        assert len(state.generations()) == 1
