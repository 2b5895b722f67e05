"""Several runs at once: each has its place, none keeps another back, and none is left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.parity_benchmark import side_by_side
from bench.parity_benchmark.side_by_side import Outcome, gpu_names, places, run_side_by_side
from hetero.errors import HeteroError
from hetero.tools.runs import Finished, Launch

DONE = Finished(iterations=[{"loss": 1.0}], report={})
HOUR = 3600.0


def launches(count: int, deadline: float | None = None) -> list[Launch]:
    return [
        Launch(
            name=f"run{number}",
            flags=(),
            nproc=2,
            folder=Path("x"),
            environ={"OWN": str(number)},
            deadline=deadline,
        )
        for number in range(count)
    ]


def together(
    count: int,
    here: list[dict[str, str]],
    *,
    left: float = HOUR,
    deadline: float | None = None,
    announce: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    return run_side_by_side(
        launches(count, deadline), here, finish_by=time.monotonic() + left, announce=announce
    )


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Finished]], None]:
    return lambda stand_in: monkeypatch.setattr(side_by_side, "run_to_end", stand_in)


def test_few_runs_spread_over_all_pairs_of_gpus() -> None:
    pairs = places(processes=4, per_pair=2, gpus=["0", "1", "2", "3"])
    assert [pair["CUDA_VISIBLE_DEVICES"] for pair in pairs] == ["0,1", "2,3"] * 2
    assert places(processes=4, per_pair=1, gpus=[]) == [{}, {}]


def test_gpus_keep_the_names_that_the_user_chose_them_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert gpu_names({}) == ["0", "1"]
    assert gpu_names({"CUDA_VISIBLE_DEVICES": "5, 3"}) == ["5", "3"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_names({}) == []


def test_as_many_runs_go_on_at_once_as_there_are_places(runs) -> None:
    """Three meet at a barrier, so fewer would wait for ever; a fourth would find no free place."""
    barrier = threading.Barrier(3, timeout=120)
    busy: list[str] = []

    def work(launch: Launch, _watch: object) -> Finished:
        place = launch.environ["PLACE"]
        assert place not in busy
        busy.append(place)
        barrier.wait()
        busy.remove(place)
        return DONE

    runs(work)
    announced: list[Outcome] = []
    here = [{"PLACE": name} for name in "abc"]
    outcomes = together(6, here, announce=announced.append)
    assert [outcome.launch.name for outcome in outcomes] == [f"run{n}" for n in range(6)]
    assert [outcome.launch.environ["OWN"] for outcome in outcomes] == list("012345")
    assert all(outcome.finished is DONE for outcome in outcomes)
    assert len(announced) == 6


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (HeteroError("out of luck"), "out of luck"),
        (FileNotFoundError(2, "gone", "report.json"), "it ended well and left no report.json"),
    ],
)
def test_a_run_that_fails_keeps_no_other_back(runs, error: Exception, problem: str) -> None:
    def work(launch: Launch, _watch: object) -> Finished:
        if launch.name == "run0":
            raise error
        return DONE

    runs(work)
    failed, *others = together(3, [{}])
    assert failed.finished is None
    assert problem in str(failed.problem)
    assert [outcome.finished for outcome in others] == [DONE, DONE]


def test_a_run_gets_its_deadline_or_what_is_left_of_the_time_for_all(runs) -> None:
    given: list[float | None] = []

    def work(launch: Launch, _watch: object) -> Finished:
        given.append(launch.deadline)
        return DONE

    runs(work)
    together(1, [{}], left=HOUR, deadline=7.0)
    together(1, [{}], left=5.0, deadline=HOUR)
    (outcome,) = together(1, [{}], left=-1.0)
    assert "not started: no time was left" in str(outcome.problem)
    first, second = given
    assert first == 7.0
    assert 0 < second <= 5.0


def test_what_ends_the_caller_ends_every_run(runs) -> None:
    """The first run has ended; the second goes on until it is told, the third never starts."""
    ended: list[str] = []

    def work(launch: Launch, watch: Callable[[], None]) -> Finished:
        if launch.name == "run0":
            return DONE
        try:
            while True:
                watch()
                time.sleep(0.01)
        finally:
            ended.append(launch.name)

    def interrupt(_outcome: Outcome) -> None:
        raise KeyboardInterrupt

    runs(work)
    with pytest.raises(KeyboardInterrupt):
        together(8, [{}, {}], announce=interrupt)
    # Others may have begun before they were told; none of them is left.
    assert ended
    assert not any("ThreadPool" in thread.name for thread in threading.enumerate())
