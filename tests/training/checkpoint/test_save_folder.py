"""The folder of --save is taken before training: shared by all ranks, and locked."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from hetero.errors import AgreedError
from megatron.training.checkpoint import save_folder
from megatron.training.checkpoint.folder import folder_name
from megatron.training.checkpoint.lock import LOCK_FILE
from megatron.training.checkpoint.save_folder import take_save_folder


def flags(save: Path | None, *, load: Path | None = None) -> Namespace:
    return Namespace(
        save=None if save is None else str(save),
        load=None if load is None else str(load),
        skip_train=False,
    )


class Ranks:
    """What one rank hears of itself and of another: does that see the lock, can it write there?"""

    def __init__(
        self, *, other_sees_it: bool = True, token: str | None = None, obstacle: str = ""
    ) -> None:
        self._other_sees_it, self._token, self._obstacle = other_sees_it, token, obstacle

    def exchange(self, phase: str, *, payload: Any = None, error: Any = None) -> list[Any]:
        if error is not None:
            raise AgreedError(str(error))
        if "visible" in payload:
            other = {"visible": self._other_sees_it, "obstacle": self._obstacle, "host": "b"}
            return [payload, other]
        return [payload if self._token is None else {"token": self._token}, payload]


def test_rank_0_holds_the_lock_and_nothing_is_said_of_an_empty_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = take_save_folder(flags(tmp_path), Ranks().exchange, rank=0)
    assert lock is not None
    assert lock.token in (tmp_path / LOCK_FILE).read_text()
    lock.release()
    assert not capsys.readouterr().out


def test_a_run_that_saves_nothing_takes_nothing() -> None:
    assert take_save_folder(flags(None), Ranks().exchange, rank=0) is None


def test_a_folder_that_another_node_does_not_share_is_refused_before_training(
    tmp_path: Path,
) -> None:
    ranks = Ranks(other_sees_it=False)
    with pytest.raises(AgreedError, match=r"rank 1 on b cannot see .* rank 0 has made; --save"):
        take_save_folder(flags(tmp_path), ranks.exchange, rank=0)
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_lock_of_another_run_in_a_folder_of_its_own_is_not_taken_for_rank_0s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_folder, "_SECONDS_TO_SEE_IT", 0.0)
    (tmp_path / LOCK_FILE).write_text('{"token": "of another run"}')
    ranks = Ranks(token="of this run")
    with pytest.raises(AgreedError, match=r"rank 0 on .* cannot see"):
        take_save_folder(flags(tmp_path), ranks.exchange, rank=1)


def test_a_rank_that_may_not_write_where_rank_0_made_a_folder_is_refused_before_training(
    tmp_path: Path,
) -> None:
    ranks = Ranks(obstacle="Permission denied")
    sentence = r"rank 1 on b cannot write in a folder that rank 0 on .* --save .*Permission denied"
    with pytest.raises(AgreedError, match=sentence):
        take_save_folder(flags(tmp_path), ranks.exchange, rank=0)
    assert list(tmp_path.iterdir()) == []


def test_each_rank_tries_to_write_as_it_will_when_it_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_folder, "_SECONDS_TO_SEE_IT", 0.0)
    (tmp_path / LOCK_FILE).write_text('{"token": "of this run"}')
    trial = tmp_path / f"{folder_name(0)}.saving"
    ranks = Ranks(token="of this run")
    with pytest.raises(AgreedError, match=r"rank 0 on .* cannot write .*No such file"):
        take_save_folder(flags(tmp_path), ranks.exchange, rank=1)
    trial.touch()
    with pytest.raises(AgreedError, match=r"rank 0 on .* cannot write .*Not a directory"):
        take_save_folder(flags(tmp_path), ranks.exchange, rank=1)
    trial.unlink()
    trial.mkdir()
    assert take_save_folder(flags(tmp_path), ranks.exchange, rank=1) is None
    assert list(trial.iterdir()) == []


def test_nothing_but_the_lock_is_left_in_the_folder(tmp_path: Path) -> None:
    lock = take_save_folder(flags(tmp_path), Ranks().exchange, rank=0)
    assert lock is not None
    assert [entry.name for entry in tmp_path.iterdir()] == [LOCK_FILE]
    lock.release()


def test_checkpoints_that_the_run_does_not_continue_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = tmp_path / "save"
    (save / folder_name(14)).mkdir(parents=True)
    for load, is_warned in ((None, True), (tmp_path / "base", True), (save, False)):
        lock = take_save_folder(flags(save, load=load), Ranks().exchange, rank=0)
        assert lock is not None
        lock.release()
        told = capsys.readouterr().out
        assert ("holds checkpoints up to iteration 14 that this run does not load" in told) is (
            is_warned
        )
