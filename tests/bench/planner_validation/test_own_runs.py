"""Plans of our own, predicted and run: what is asked of them, and what the comparison says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
import yaml

from bench.planner_validation import own_bench, own_report
from bench.planner_validation.measured_run import CpuContention, MeasuredRun
from bench.planner_validation.own_bench import OwnBench
from bench.planner_validation.own_cases import FACTORS, ON_CPU, ON_GPU, Case, Scale, cases
from hetero.errors import UserError
from hetero.planner.layer_profile import (
    AcceleratorProfile,
    MeasuredProfile,
    PartCosts,
    PassTimes,
    Point,
)
from hetero.tools.launching.processes import Step, StepFailure
from hetero.tools.planning.plan_files import training_flags
from hetero.tools.runs import Finished, Launch
from megatron.hetero.arguments import parse_args

PLANNED = {
    1.5: Case(name="planned x1.5", factor=1.5, layers=(5, 3)),
    2.0: Case(name="planned x2", factor=2.0, layers=(6, 2)),
}


def profile() -> MeasuredProfile:
    def measured(factor: float) -> AcceleratorProfile:
        def costs(size: int, recompute: str) -> PartCosts:
            layer = PassTimes(0.01 * factor * size, 0.02 * factor * size)
            return PartCosts(layer=layer, embedding=layer, head=layer, layer_activation_bytes=1e6)

        points = {
            Point(1, size, ON_CPU.model["seq-length"], recompute): costs(size, recompute)
            for size in (1, 2)
            for recompute in ("none", "full")
        }
        return AcceleratorProfile(points, 1e-9)

    names = {f"here-amd-x{factor:g}": factor for factor in FACTORS} | {"here-nvidia-x1": 1.0}
    return MeasuredProfile({name: measured(factor) for name, factor in names.items()})


PROFILE = profile()


class FakeBench(OwnBench):
    """A bench whose runs take as long as a function of the prediction says."""

    profile = PROFILE
    link = {"rail_gbits": 10.0, "rail_latency_us": 10.0}  # noqa: RUF012
    base_bytes = 5e8
    cases = cases(ON_CPU, PLANNED)
    slower = 1.0
    runs = 0

    def measure(self, case: Case) -> MeasuredRun:
        FakeBench.runs += 1
        (predicted,) = self.predict(case)
        seconds = predicted.seconds * self.slower
        return MeasuredRun(
            [9.0, 9.0, seconds, seconds], [use.peak_bytes for use in predicted.stages]
        )


@pytest.fixture
def fake_bench(monkeypatch: pytest.MonkeyPatch) -> type[FakeBench]:
    monkeypatch.setattr(own_report, "OwnBench", FakeBench)
    monkeypatch.setattr(FakeBench, "runs", 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return FakeBench


@pytest.mark.parametrize("scale", [ON_CPU, ON_GPU])
def test_every_plan_is_one_that_training_accepts(scale: Scale, tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    planned = {
        factor: replace(case, layers=(scale.layers - 3, 3)) for factor, case in PLANNED.items()
    }
    asked = cases(scale, planned)
    assert len(asked) >= 12
    assert len({case.name for case in asked}) == len(asked)
    for case in asked:
        placement = case.placement(scale)
        assert placement.plan.num_layers == scale.layers
        flags = scale.flags() | training_flags(placement, tmp_path / "plan.yaml")
        file.write_text(yaml.safe_dump(flags))
        args = parse_args(["--yaml-cfg", str(file), "--train-iters", "2"], world_size=2)
        assert args.params_dtype == ("bfloat16" if scale.dtype == "bf16" else "float32")


def test_runs_as_predicted_meet_every_target(fake_bench: type[FakeBench], tmp_path: Path) -> None:
    figures = tmp_path / "own.json"
    text = own_report.own_runs(tmp_path / "own", seconds=60, figures=figures)
    assert "missed" not in text
    assert text.count("met") == 5
    assert "beats the even split" in text
    raw = json.loads(figures.read_text())
    assert len(raw["runs"]) == fake_bench.runs == len(FakeBench.cases)
    assert "simulated" in raw
    again = own_report.own_runs(tmp_path / "own", seconds=60, figures=figures)
    assert (again, fake_bench.runs) == (text, len(FakeBench.cases))


def test_a_step_that_is_far_off_and_what_there_was_no_time_for_is_said(
    fake_bench: type[FakeBench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeBench, "slower", 1.1)
    text = own_report.own_runs(tmp_path / "far", seconds=60, figures=None)
    assert "largest 9.1 %" in text
    assert "(missed: 5%)" in text
    first = FakeBench.cases[0]
    known = json.dumps(["CPU", ON_CPU.flags(), ON_CPU.global_batch, asdict(first)])
    measured = MeasuredRun([1.0, 1.0], [6e8, 6e8])
    (tmp_path / "measured.json").write_text(json.dumps({known: asdict(measured)}))
    fake_bench.runs = 0
    text = own_report.own_runs(tmp_path, seconds=1e-9, figures=None)
    assert fake_bench.runs == 0
    assert f"{len(FakeBench.cases) - 1} plans not run yet" in text


def test_an_interrupted_command_leaves_the_figures_of_what_it_ran(
    fake_bench: type[FakeBench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = FakeBench.measure

    def interrupted(bench: FakeBench, case: Case) -> MeasuredRun:
        if FakeBench.runs == 2:
            raise KeyboardInterrupt
        return measure(bench, case)

    monkeypatch.setattr(FakeBench, "measure", interrupted)
    figures = tmp_path / "own.json"
    with pytest.raises(KeyboardInterrupt):
        own_report.own_runs(tmp_path / "own", seconds=60, figures=figures)
    assert len(json.loads(figures.read_text())["runs"]) == 2


def test_one_gpu_is_too_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(UserError, match="needs two GPUs, and one is visible"):
        own_report.own_runs(tmp_path, seconds=60, figures=None)


def test_a_profile_that_fails_ends_the_one_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    begun = threading.Event()

    def play(step: Step, watch: Callable[[], None]) -> None:
        if "nvidia" in step.name:
            begun.wait()
            raise StepFailure(replace(step, log=Path(own_report.__file__)), 1)
        begun.set()
        try:
            while True:
                watch()
                time.sleep(0.01)
        finally:
            ended.append(step.name)

    monkeypatch.setattr(own_bench, "run_step", play)
    with pytest.raises(StepFailure, match="profile_here-nvidia-x1"):
        _ = OwnBench(tmp_path).profile
    assert ended == ["profile_here-amd-x1"]


def test_a_cpu_is_profiled_anew_just_before_and_after_a_plan_is_run(
    fake_bench: type[FakeBench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its speed drifts; the prediction is of the same minute as the run."""
    bench = fake_bench(tmp_path)
    case = next(case for case in bench.cases if case.name == "recompute")
    (before,) = bench.predict(case)
    asked: dict[str, Step] = {}

    def play(step: Step, watch: Callable[[], None]) -> None:
        asked[step.name] = step
        name = step.command[step.command.index("--accelerator") + 1]
        points = PROFILE.accelerators[name].points
        slower = {
            point: replace(costs, layer=PassTimes(costs.layer.forward * 4, costs.layer.backward))
            for point, costs in points.items()
        }
        found = MeasuredProfile({name: AcceleratorProfile(slower, 1e-9)}, model={"layers": 8})
        Path(step.command[step.command.index("--out") + 1]).write_text(
            json.dumps(found.to_mapping())
        )

    def ran(launch: Launch, _: object) -> Finished:
        asked[launch.name] = Step("", (), Path(), Path(), {})
        return Finished(
            iterations=[{"elapsed_ms": 1.0}], report={"ranks": [{"peak_memory_bytes": 1.0}]}
        )

    monkeypatch.setattr(own_bench, "run_step", play)
    monkeypatch.setattr(own_bench, "run_to_end", ran)
    OwnBench.measure(bench, case)
    names = list(asked)
    devices = "here-amd-x1", "here-nvidia-x1"
    for at, when in ((slice(2), "before"), (slice(3, 5), "after")):
        assert sorted(names[at]) == [f"profile_recompute_{when}_{device}" for device in devices]
        for name in names[at]:
            words = " ".join(asked[name].command)
            assert "--micro-batch 1 --recompute full --seconds-a-point" in words
    assert names[2] == "recompute"
    both = bench.predict(case)
    assert len(both) == 2
    assert all(one.seconds > 1.5 * before.seconds for one in both)


def test_links_take_what_a_run_sends_up_to_the_whole_of_their_rings(tmp_path: Path) -> None:
    bench = OwnBench(tmp_path)
    bench.gpus = 0
    even, replicas = Case(name="even", factor=1.0, layers=(4, 4)), Case(name="r", factor=1.0)
    few, many = (bench._links_bytes(even, bench.model, steps, 12) for steps in (1, 2))
    assert many - few == 2 * 12 * bench.model.boundary_bytes(1, 4)
    assert bench._links_bytes(even, bench.model, 10**6, 12) > 64 << 20
    assert bench._links_bytes(replicas, bench.model, 10**6, 12) == 16 << 20


def test_ranks_are_looked_for_once_because_that_holds_them_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks through all processes of a machine takes a core from one that trains."""
    launch = Launch(name="run", flags=(), nproc=1, folder=tmp_path, environ={})
    launch.metrics.write_text("{}\n")
    searched: list[bool] = []

    class Searched(psutil.Process):
        def children(self, recursive: bool = False) -> list[psutil.Process]:
            searched.append(recursive)
            return [psutil.Process()]

    monkeypatch.setattr("bench.planner_validation.measured_run.psutil.Process", Searched)
    queues = CpuContention(launch)
    for _ in range(3):
        queues.look()
    assert searched == [True]
    assert 0 <= queues.share < 1
