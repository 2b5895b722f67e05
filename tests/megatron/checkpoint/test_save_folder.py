"""The folder of --save is taken before training: shared by all ranks, and locked."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from hetero.errors import UserError
from megatron.hetero.checkpoint import save_folder
from megatron.hetero.checkpoint.folder import folder_name
from megatron.hetero.checkpoint.lock import LOCK_FILE, SaveLock
from megatron.hetero.checkpoint.save_folder import take_save_folder
from tests.sentences import sentence_of


class Ranks:
    """What one rank hears of itself and of another: does that see the lock, can it write there?"""

    def __init__(
        self, *, other_sees_it: bool = True, token: str | None = None, obstacle: str = ""
    ) -> None:
        self._other_sees_it, self._token, self._obstacle = other_sees_it, token, obstacle

    def exchange(self, phase: str, *, payload: Any = None, error: Any = None) -> list[Any]:
        if error is not None:
            raise UserError(str(error), known_to_all=True)
        if "visible" in payload:
            other = {"visible": self._other_sees_it, "obstacle": self._obstacle, "host": "b"}
            return [payload, other]
        return [payload if self._token is None else {"token": self._token}, payload]


def take(
    save: Path | None, *, load: Path | None = None, rank: int = 0, **others: Any
) -> SaveLock | None:
    """What the rank is given of the folder; `others` are those of `Ranks`."""
    args = Namespace(save=save and str(save), load=load and str(load), skip_train=False)
    return take_save_folder(args, Ranks(**others).exchange, rank=rank)


def refusal(save: Path, **how: Any) -> str:
    return sentence_of(take, save, error=UserError, **how)


def test_rank_0_locks_an_empty_folder_silently_and_writes_no_other_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = take(tmp_path)
    assert lock.token in (tmp_path / LOCK_FILE).read_text()
    assert [entry.name for entry in tmp_path.iterdir()] == [LOCK_FILE]
    lock.release()
    assert not capsys.readouterr().out


def test_a_run_that_saves_nothing_takes_nothing() -> None:
    assert take(None) is None


def test_a_folder_that_another_node_does_not_share_is_refused_before_training(
    tmp_path: Path,
) -> None:
    said = refusal(tmp_path, other_sees_it=False)
    assert re.search(r"rank 1 on b cannot see .* rank 0 has made; --save", said)
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_rank_that_may_not_write_to_the_save_folder_is_refused_before_training(
    tmp_path: Path,
) -> None:
    sentence = r"rank 1 on b cannot write in a folder that rank 0 on .* --save .*Permission denied"
    assert re.search(sentence, refusal(tmp_path, obstacle="Permission denied"))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a lock that a rank sees at once."""
    monkeypatch.setattr(save_folder, "_SECONDS_TO_SEE_IT", 0.0)
    (tmp_path / LOCK_FILE).write_text('{"token": "of its run"}')
    return tmp_path


def test_a_lock_of_another_run_in_a_folder_of_its_own_is_not_taken_for_rank_0s(
    theirs: Path,
) -> None:
    said = refusal(theirs, rank=1, token="of this run")
    assert re.search(r"rank 0 on .* cannot see", said)


def test_each_rank_tries_to_write_as_it_will_when_it_saves(theirs: Path) -> None:
    trial, of_rank_1 = theirs / f"{folder_name(0)}.saving", {"rank": 1, "token": "of its run"}
    said = refusal(theirs, **of_rank_1)
    assert re.search(r"rank 0 on .* cannot write .*No such file", said)
    trial.touch()
    said = refusal(theirs, **of_rank_1)
    assert re.search(r"rank 0 on .* cannot write .*Not a directory", said)
    trial.unlink()
    trial.mkdir()
    assert take(theirs, **of_rank_1) is None
    assert list(trial.iterdir()) == []


def test_checkpoints_that_the_run_does_not_continue_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = tmp_path / "save"
    (save / folder_name(14)).mkdir(parents=True)
    warning = "holds checkpoints up to iteration 14 that this run does not load"
    for load, is_warned in ((None, True), (tmp_path / "base", True), (save, False)):
        take(save, load=load).release()
        assert (warning in capsys.readouterr().out) is is_warned
