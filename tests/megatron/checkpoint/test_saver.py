"""Saving by several ranks, played by threads: all or nothing, and everybody knows which."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero.errors import HeteroError, LinkError
from megatron.hetero.checkpoint import saver as saving
from megatron.hetero.checkpoint.destination import NodeFolder, RetentionPolicy, SharedFolder
from megatron.hetero.checkpoint.folder import TRACKER
from megatron.hetero.checkpoint.lock import LockLost
from megatron.hetero.checkpoint.reader import CheckpointReader
from megatron.hetero.checkpoint.regions import Shard
from megatron.hetero.checkpoint.safetensors_writer import WriteItem
from megatron.hetero.checkpoint.saver import (
    Contents,
    SaveOutcome,
    Saver,
)
from megatron.hetero.checkpoint.snapshot import DeviceToHostCopier, Snapshot

RANKS = 3
CPU = torch.device("cpu")
WHOLE = torch.arange(12 * 5, dtype=torch.float32).view(12, 5)


class PlayedControl:
    """`ControlGroup` between threads of one process."""

    def __init__(self, rank: int, barrier: threading.Barrier, table: dict[int, Any]) -> None:
        self.rank, self.world_size = rank, RANKS
        self._barrier, self._table = barrier, table

    def all_gather_ints(self, mine: int) -> list[int]:
        return self._gather(mine)

    def all_gather_strings(self, mine: str) -> list[str]:
        return self._gather(mine)

    def _gather(self, mine: Any) -> list[Any]:
        self._table[self.rank] = mine
        self._barrier.wait(120)
        everyone = [self._table[rank] for rank in range(RANKS)]
        self._barrier.wait(120)
        return everyone


def on_every_rank(play: Callable[[PlayedControl], Any]) -> list[Any]:
    barrier, table = threading.Barrier(RANKS), {}
    with ThreadPoolExecutor(RANKS) as pool:
        jobs = [pool.submit(play, PlayedControl(r, barrier, table)) for r in range(RANKS)]
        return [job.result(timeout=120) for job in jobs]


def contents(rank: int, *, source: Callable[[], torch.Tensor] | None = None) -> Contents:
    shard = Shard.split((4, 5), dim=0, rank=rank, ranks=RANKS)
    mine = WHOLE[rank * 4 : rank * 4 + 4].clone()
    write_item = WriteItem(
        "w", (12, 5), torch.float32, tuple(shard.regions()), source or (lambda: mine)
    )
    return Contents(write_items=[write_item], args={"a": 1}, run={"iteration": 5}, optimizer_step=5)


def shared(
    folder: Path,
    control: PlayedControl,
    *,
    kept: RetentionPolicy | None = None,
    lock: Any = None,
) -> SharedFolder:
    return SharedFolder(
        folder, rank=control.rank, world_size=RANKS, kept=kept or RetentionPolicy(), lock=lock
    )


def save(
    control: PlayedControl,
    folder: Path,
    *,
    iteration: int = 5,
    source: Callable[[], torch.Tensor] | None = None,
    **how: Any,
) -> SaveOutcome:
    saver = Saver(shared(folder, control, **how), control)  # type: ignore[arg-type]
    saver.start(iteration, contents(control.rank, source=source))
    outcome = saver.finish()
    assert not saver.in_flight
    return outcome


def failing() -> torch.Tensor:
    raise OSError(28, "No space left on device")


def test_a_save_of_several_ranks_is_one_checkpoint(tmp_path: Path) -> None:
    outcomes = on_every_rank(lambda control: save(control, tmp_path))
    assert [outcome.problem for outcome in outcomes] == [None] * RANKS
    with CheckpointReader.open(tmp_path) as reader:
        assert torch.equal(reader.tensor("w"), WHOLE)
        assert reader.run == {"iteration": 5, "optimizer_step": 5}
        parts = [f"rank_{rank:05d}.safetensors" for rank in range(RANKS)]
        assert sorted(path.name for path in reader.folder.iterdir()) == ["index.json", *parts]
    for part, outcome in zip(parts, outcomes, strict=True):
        assert outcome.part.bytes == (tmp_path / "iter_0000005" / part).stat().st_size
        assert 0 < outcome.part.seconds <= outcome.seconds
    assert outcomes[0].bytes == sum(outcome.part.bytes for outcome in outcomes)


@pytest.mark.parametrize("victim", range(RANKS))
def test_a_part_that_cannot_be_written_undoes_the_save_on_all(tmp_path: Path, victim: int) -> None:
    on_every_rank(lambda control: save(control, tmp_path))
    outcomes = on_every_rank(
        lambda control: save(
            control, tmp_path, iteration=9, source=failing if control.rank == victim else None
        )
    )
    said = f"rank {victim}: No space left on device"
    assert [outcome.problem for outcome in outcomes] == [said] * RANKS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000005", TRACKER]
    assert (tmp_path / TRACKER).read_text() == "5"


def test_a_rank_that_does_not_see_the_folder_says_so(tmp_path: Path) -> None:
    elsewhere = tmp_path / "other disk"
    outcomes = on_every_rank(
        lambda control: save(control, elsewhere if control.rank == 1 else tmp_path / "disk")
    )
    assert all("rank 1: it does not see" in str(outcome.problem) for outcome in outcomes)
    assert all("all ranks share" in str(outcome.problem) for outcome in outcomes)


def test_a_checkpoint_that_would_not_be_whole_gets_no_name(tmp_path: Path, monkeypatch) -> None:
    """Whatever goes wrong in the parts, rank 0 checks the index before it writes it."""
    monkeypatch.setattr(saving, "_joined", lambda known, part, name: part)
    outcomes = on_every_rank(lambda control: save(control, tmp_path))
    assert {outcome.problem for outcome in outcomes} == {"rank 0: tensor w is not whole"}
    assert list(tmp_path.iterdir()) == []


def test_a_save_in_the_background_holds_what_was_there_when_it_began(tmp_path: Path) -> None:
    def play(control: PlayedControl) -> SaveOutcome:
        weights = WHOLE[control.rank * 4 : control.rank * 4 + 4].clone()
        snapshot = Snapshot(DeviceToHostCopier(CPU))
        saver = Saver(shared(tmp_path, control), control, snapshot=snapshot)  # type: ignore[arg-type]
        saver.start(5, contents(control.rank, source=lambda: weights))
        saver.order_updates()
        weights.zero_()
        outcome = None
        while outcome is None:
            outcome = saver.poll()
        saver.close()
        return outcome

    outcomes = on_every_rank(play)
    assert [outcome.problem for outcome in outcomes] == [None] * RANKS
    with CheckpointReader.open(tmp_path) as reader:
        assert torch.equal(reader.tensor("w"), WHOLE)


class RefusingOnce(DeviceToHostCopier):
    """A driver that pins nothing the first time it is asked."""

    _refused = False

    def register(self, host: torch.Tensor) -> None:
        if not self._refused:
            self._refused = True
            raise LinkError("cuMemHostRegister failed")


def test_a_rank_without_memory_for_a_copy_says_so_and_the_next_saves_are_whole(
    tmp_path: Path,
) -> None:
    def play(control: PlayedControl) -> list[str | None]:
        snapshot = Snapshot(RefusingOnce(CPU) if control.rank == 1 else DeviceToHostCopier(CPU))
        folder = shared(tmp_path, control, kept=RetentionPolicy(last=2))
        saver = Saver(folder, control, snapshot=snapshot)  # type: ignore[arg-type]
        saver.reserve(contents(control.rank).write_items)
        problems = []
        for iteration in (5, 6, 7, 8):
            saver.start(iteration, contents(control.rank))
            outcome = saver.finish()
            assert (outcome.part is None) == (outcome.problem is not None)
            problems.append(outcome.problem)
        assert saver.finish() is None
        saver.close()
        return problems

    said = (
        "rank 1: there is no host memory for a copy of the weights (cuMemHostRegister failed); "
        "a save without --async-save needs none"
    )
    assert on_every_rank(play) == [[said, None, None, None]] * RANKS
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["iter_0000007", "iter_0000008", TRACKER]


def test_an_older_checkpoint_that_cannot_be_removed_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = shutil.rmtree

    def refusing(path: Path, ignore_errors: bool = False) -> None:
        if Path(path).name == "iter_0000005.removing" and not ignore_errors:
            raise OSError(13, "Permission denied", str(path))
        if Path(path).name != "iter_0000005.removing":
            remove(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", refusing)
    said = []
    for iteration in (5, 6, 7):
        outcomes = on_every_rank(
            lambda control, iteration=iteration: save(
                control, tmp_path, iteration=iteration, kept=RetentionPolicy(last=1)
            )
        )
        assert [outcome.problem for outcome in outcomes] == [None] * RANKS
        assert (tmp_path / TRACKER).read_text() == str(iteration)
        said.append(outcomes[0].not_removed)
    assert said == ["", "iter_0000005.removing (Permission denied)", ""]


class PlayedLock:
    """`SaveLock` of a run whose folder is taken over after so many looks at it."""

    def __init__(self, looks: int) -> None:
        self._left = looks

    def require_held(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise LockLost("another run (host b, pid 7) took over")


def taken_over(control: PlayedControl, *, looks: int) -> PlayedLock | None:
    return PlayedLock(looks) if control.rank == 0 else None


def test_a_run_whose_folder_another_has_taken_over_writes_nothing_and_ends(tmp_path: Path) -> None:
    def play(control: PlayedControl) -> str:
        with pytest.raises(HeteroError) as error:
            save(control, tmp_path, lock=taken_over(control, looks=0))
        return str(error.value)

    assert on_every_rank(play) == ["another run (host b, pid 7) took over"] * RANKS
    assert list(tmp_path.iterdir()) == []


def test_a_folder_taken_over_during_a_save_keeps_what_the_other_run_wrote(tmp_path: Path) -> None:
    outcomes = on_every_rank(
        lambda control: save(control, tmp_path, lock=taken_over(control, looks=1))
    )
    problems = {outcome.problem for outcome in outcomes}
    assert problems == {"rank 0: another run (host b, pid 7) took over"}
    assert not (tmp_path / "iter_0000005").exists()
    assert not (tmp_path / TRACKER).exists()


def save_in_memory(
    control: PlayedControl, folder: Path, destination: NodeFolder | None = None, **how: Any
) -> SaveOutcome:
    """Ranks 0 and 1 are on one node, rank 2 is alone on another."""
    saver = Saver(destination or node(control, folder), control)  # type: ignore[arg-type]
    saver.start(how.pop("iteration", 5), contents(control.rank, **how))
    outcome = saver.finish()
    saver.close()
    return outcome


def node(control: PlayedControl, folder: Path) -> NodeFolder:
    path = folder / ("a" if control.rank < 2 else "b")
    path.mkdir(parents=True, exist_ok=True)
    return NodeFolder(path, local_rank=control.rank % 2)


def test_in_memory_every_node_has_its_ranks_files_and_the_same_index(tmp_path: Path) -> None:
    outcomes = on_every_rank(lambda control: save_in_memory(control, tmp_path))
    assert [outcome.problem for outcome in outcomes] == [None] * RANKS
    a, b = (tmp_path / name / "iter_0000005" for name in "ab")
    parts = [f"rank_{rank:05d}.safetensors" for rank in range(RANKS)]
    assert sorted(path.name for path in a.iterdir()) == ["index.json", *parts[:2]]
    assert sorted(path.name for path in b.iterdir()) == ["index.json", parts[2]]
    assert (a / "index.json").read_text() == (b / "index.json").read_text()
    shutil.copy(b / parts[2], a)
    with CheckpointReader.open(tmp_path / "a") as reader:
        assert torch.equal(reader.tensor("w"), WHOLE)
        assert reader.run == {"iteration": 5, "optimizer_step": 5}
        assert reader.args == {"a": 1}


def test_in_memory_two_generations_are_kept_and_later_records_are_short(tmp_path: Path) -> None:
    def play(control: PlayedControl) -> list[int]:
        destination, sent = node(control, tmp_path), []
        gather = control.all_gather_strings
        control.all_gather_strings = lambda mine: (sent.append(mine), gather(mine))[1]  # type: ignore[method-assign]
        for iteration in (5, 6, 7):
            save_in_memory(control, tmp_path, destination, iteration=iteration)
        return [text.count('"w"') for text in sent if text.startswith("{")]

    assert on_every_rank(play) == [[1, 0, 0]] * RANKS
    for name in "ab":
        found = sorted(path.name for path in (tmp_path / name).iterdir())
        assert found == ["iter_0000006", "iter_0000007"]
    shutil.copy(
        tmp_path / "b" / "iter_0000007" / "rank_00002.safetensors", tmp_path / "a/iter_0000007"
    )
    with CheckpointReader.open(tmp_path / "a") as reader:
        assert torch.equal(reader.tensor("w"), WHOLE)


def test_in_memory_a_node_awaits_its_launchers_copy_of_what_this_run_has_saved(
    tmp_path: Path,
) -> None:
    def play(control: PlayedControl) -> list[bool]:
        path = tmp_path / ("a" if control.rank < 2 else "b")
        path.mkdir(exist_ok=True)
        destination = NodeFolder(path, local_rank=control.rank % 2, copies_of=[7])
        awaited = [destination.is_writer and destination.generations.awaits_copies()]
        for iteration in (5, 6):
            save_in_memory(control, tmp_path, destination, iteration=iteration)
            awaited.append(destination.is_writer and destination.generations.awaits_copies())
            if destination.is_writer:
                (path / "of_7" / f"iter_000000{iteration}").mkdir(parents=True)
            awaited.append(destination.is_writer and destination.generations.awaits_copies())
        return awaited

    writers = [False, True, False, True, False]
    assert on_every_rank(play) == [writers, [False] * 5, writers]


@pytest.mark.parametrize("victim", range(RANKS))
def test_in_memory_a_failure_of_one_rank_leaves_both_generations(
    tmp_path: Path, victim: int
) -> None:
    for iteration in (5, 6):
        on_every_rank(lambda c, i=iteration: save_in_memory(c, tmp_path, iteration=i))
    outcomes = on_every_rank(
        lambda c: save_in_memory(
            c, tmp_path, iteration=7, source=failing if c.rank == victim else None
        )
    )
    assert {outcome.problem for outcome in outcomes} == {f"rank {victim}: No space left on device"}
    for name in "ab":
        found = sorted(path.name for path in (tmp_path / name).iterdir())
        assert found == ["iter_0000005", "iter_0000006"]


def test_in_memory_a_node_gives_up_what_another_could_not_commit(tmp_path: Path) -> None:
    class Full(NodeFolder):
        def commit(self, folder: Path, text: str) -> str:
            raise OSError(28, "No space left on device")

    def play(control: PlayedControl) -> SaveOutcome:
        destination = node(control, tmp_path)
        if control.rank == 2:
            destination = Full(destination.path, local_rank=0)
        return save_in_memory(control, tmp_path, destination, iteration=7)

    on_every_rank(lambda control: save_in_memory(control, tmp_path, iteration=6))
    outcomes = on_every_rank(play)
    assert {outcome.problem for outcome in outcomes} == {"rank 2: No space left on device"}
    for name in "ab":
        assert [path.name for path in (tmp_path / name).iterdir()] == ["iter_0000006"]


def test_an_attempt_that_went_back_removes_what_was_written_after(tmp_path: Path) -> None:
    for iteration in (5, 6):
        on_every_rank(lambda c, i=iteration: save_in_memory(c, tmp_path, iteration=i))
    (tmp_path / "a" / "iter_0000007.saving").mkdir()

    def go_back(control: PlayedControl) -> None:
        destination = node(control, tmp_path)
        destination.begin_run(5)
        destination.close()

    on_every_rank(go_back)
    for name in "ab":
        assert [path.name for path in (tmp_path / name).iterdir()] == ["iter_0000005"]
