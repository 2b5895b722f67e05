"""One stage is made slow: the timers show that the other waits for it, and change nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron.hetero.timers import PARTS
from tests.distributed.harness import MIXED, TINY_LLAMA, launch_well, read_rows

FAULTY = Path(__file__).with_name("faulty_training.py")
# Layouts of such a model compute the same bits.
FLAGS = [
    *TINY_LLAMA,
    *"--untie-embeddings-and-output-weights --clip-grad 0 --train-iters 3".split(),
    *"--mock-data --tokenizer-type NullTokenizer --vocab-size 96".split(),
]
# megatron-core's own communicator, with receives that are posted early and waited for later.
INTERLEAVED = (
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    " --timing-log-option all --log-timers-to-tensorboard"
).split()


@dataclass(frozen=True)
class Run:
    """The rows of the metrics file, every rank's output, and the folder of TensorBoard."""

    rows: list[dict[str, Any]]
    outputs: list[str]
    points: Path

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows]

    def stages(self) -> list[dict[str, Any]]:
        """Of the shortest iteration: the first also warms up, and a busy machine holds ranks up."""
        shortest = min(self.rows[1:], key=lambda row: row["elapsed_ms"])
        stages: list[dict[str, Any]] = shortest["timing"]["stages"]
        return stages


def _run(folder: Path, flags: list[str], nproc: int, *, fault: str | None = None) -> Run:
    metrics, points = folder / "metrics.jsonl", folder / "points"
    written = ["--metrics-file", str(metrics), "--tensorboard-dir", str(points)]
    environ = {"HETERO_VENDOR": "plan"} if "--hetero-pipeline" in flags else {}
    outputs = launch_well(
        [*FLAGS, *flags, *written],
        nproc,
        environ=environ | ({"FAULT": fault} if fault else {}),
        scripts=dict.fromkeys(range(nproc), FAULTY) if fault else None,
    )
    return Run(rows=read_rows(metrics), outputs=outputs, points=points)


@pytest.fixture(scope="module")
def untimed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return _run(tmp_path_factory.mktemp("untimed"), [], 1, fault="late update")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    flags = [*MIXED, "--timing-log-level", "2"]
    return _run(tmp_path_factory.mktemp("mixed"), flags, 2, fault="rank 0 slow")


@pytest.fixture(scope="module")
def interleaved(tmp_path_factory: pytest.TempPathFactory) -> Run:
    flags = [*INTERLEAVED, "--timing-log-level", "2"]
    return _run(tmp_path_factory.mktemp("interleaved"), flags, 2, fault="rank 1 slow")


def _longest(stage: dict[str, Any]) -> str:
    parts = stage["parts_ms"]
    return max(parts, key=parts.__getitem__)


def _sum(stage: dict[str, Any], *parts: str) -> float:
    return sum(stage["parts_ms"][part] for part in parts)


def test_the_stage_after_a_slow_one_waits_for_it(mixed: Run) -> None:
    slow, waiting = mixed.stages()
    assert (slow["vendor"], waiting["vendor"]) == ("amd", "nvidia")
    assert _longest(slow) == "forward"
    assert _longest(waiting) == "wait prev"
    assert waiting["parts_ms"]["wait prev"] > slow["parts_ms"]["wait next"]
    assert waiting["parts_ms"]["wait next"] == slow["parts_ms"]["wait prev"] == 0


def test_overlapped_receives_are_waited_for_where_they_are_needed(interleaved: Run) -> None:
    """Both neighbours of each of two stages are the other one."""
    waiting, slow = interleaved.stages()
    waited, computed = _sum(waiting, "wait prev", "wait next"), _sum(waiting, "forward", "backward")
    assert _longest(slow) == "forward"
    assert waited > computed
    assert waited > _sum(slow, "wait prev", "wait next")


def test_the_parts_of_an_iteration_add_up_to_it(mixed: Run, interleaved: Run) -> None:
    for row in (*mixed.rows, *interleaved.rows):
        for stage in row["timing"]["stages"]:
            assert all(ms >= 0 for ms in stage["parts_ms"].values())
            assert set(stage["parts_ms"]) <= set(PARTS)
            assert sum(stage["parts_ms"].values()) == pytest.approx(stage["iteration_ms"])
        # Rank 0's clock, read inside of what it logs as the time of the iteration.
        assert row["timing"]["stages"][0]["iteration_ms"] <= row["elapsed_ms"]


def test_losses_are_those_of_a_run_without_timers_which_tells_none(
    untimed: Run, mixed: Run, interleaved: Run
) -> None:
    assert untimed.losses == mixed.losses == interleaved.losses
    assert all("timing" not in row for row in untimed.rows)
    assert "where the time of an iteration went" not in untimed.outputs[0]


def test_one_rank_tells_after_every_log_what_was_simulated(mixed: Run, interleaved: Run) -> None:
    first, second = mixed.outputs
    assert first.count("where the time of an iteration went") == 3
    assert first.count("vendors are simulated:") == 3
    assert "nvidia (simulated)  1 " in first
    assert "(min, max) time across ranks (ms):\n    forward-backward ....." in first
    assert "time" not in second
    assert "simulated" not in interleaved.outputs[0]
    assert "times across ranks (ms):\n  forward-backward:\n     rank  0: " in interleaved.outputs[0]


def test_points_are_the_longest_times_in_seconds(mixed: Run, interleaved: Run) -> None:
    """--log-timers-to-tensorboard"""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(interleaved.points))
    events.Reload()
    (first, *_, last) = events.Scalars("backward-compute-time")
    assert (first.step, last.step) == (1, 3)
    ranks = interleaved.rows[-1]["timing"]["ranks_ms"]["backward-compute"]
    assert last.value == pytest.approx(max(ranks) / 1e3)
    without = EventAccumulator(str(mixed.points))
    without.Reload()
    assert "backward-compute-time" not in without.Tags()["scalars"]


def test_the_time_of_an_iteration_ends_with_its_update_and_not_before(untimed: Run) -> None:
    """A GPU's update is under way when its enqueuing returns; its time was counted nowhere."""
    assert all(row["elapsed_ms"] >= 500 for row in untimed.rows)
