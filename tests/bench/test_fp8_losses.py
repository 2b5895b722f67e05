"""bench/fp8_losses.py: its runs are accepted, and losses that leave the band of the seeds fail."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from bench import fp8_losses
from bench.fp8_losses import PIPELINES, RECIPES, SEEDS, SIZES, Run, compared, judged, planned_runs
from bench.parity_benchmark.side_by_side import Outcome
from hetero.errors import HeteroError
from hetero.tools.runs import Finished, Launch
from megatron.hetero.arguments import parse_args

DATA = ("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100")
ITERATIONS = 100


def defaults() -> Namespace:
    sizes = {name.replace("-", "_"): value for name, (value, _) in SIZES.items()}
    return Namespace(**sizes, lr=6e-4)


@pytest.mark.parametrize("on_cpu", [False, True])
def test_training_accepts_the_flags_of_every_run(on_cpu: bool) -> None:
    runs = planned_runs(list(RECIPES), on_cpu=on_cpu)
    assert len({run.name for run in runs}) == len(runs)
    for run in runs:
        words = fp8_losses.run_flags(defaults(), run)
        args = parse_args([*words, *DATA], world_size=run.processes)
        assert (args.fp8_format is None) == (run.recipe is None)


def test_a_gpu_trains_each_recipe_and_a_cpu_all_pairs_of_types() -> None:
    recipes = list(RECIPES)
    assert [run.recipe for run in planned_runs(recipes, on_cpu=False)] == [*recipes, *[None] * 3]
    types = [run.types for run in planned_runs(["delayed"], on_cpu=True)]
    assert types == [*PIPELINES, *[()] * len(SEEDS)]


def outcome(loss_of: float) -> Outcome:
    """A run whose losses are those of a curve times a factor."""
    rows = [
        {
            "iteration": number,
            "loss": loss_of * (2.0 + 5.0 / number),
            "grad_norm": 1.0,
            "skipped": False,
            "batch_size": 16,
        }
        for number in range(1, ITERATIONS + 1)
    ]
    report = {"weights": {"sha256": str(loss_of)}}
    launch = Launch("run", (), 1, Path(), {})
    return Outcome(launch, finished=Finished(rows, report))


def test_losses_between_those_of_the_seeds_pass_and_others_fail() -> None:
    seeds = {
        Run(seed=seed): outcome(factor)
        for seed, factor in zip(SEEDS, (1, 1.002, 0.998), strict=True)
    }
    found = judged(
        compared({Run("delayed"): outcome(1.001), Run("rowwise"): outcome(1.05), **seeds})
    )
    assert found["smoothed_over"] == ITERATIONS // 10
    assert 0.02 < found["half_width_of_band_at_end"] < 0.025
    near, far = found["runs"]["delayed"], found["runs"]["rowwise"]
    assert (near["passed"], near["share_inside"]) == (True, 1.0)
    assert (far["passed"], far["share_inside"]) == (False, 0.0)
    assert near["final_beside_same_seed"] == pytest.approx(1e-3, rel=1e-2)
    assert far["of_each_iteration_beside_same_seed"]["largest"] == pytest.approx(0.05, rel=1e-2)
    assert "FAIL" in fp8_losses.table(found).splitlines()[-1]


def test_a_run_of_bf16_that_failed_ends_the_comparison() -> None:
    failed = Outcome(Launch("run", (), 1, Path(), {}), problem="it ended")
    outcomes = {Run(seed=seed): outcome(1 + seed / 100) for seed in SEEDS[:2]}
    with pytest.raises(HeteroError, match="bf16, seed 3 has no losses to compare with: it ended"):
        compared({**outcomes, Run(seed=SEEDS[2]): failed, Run("delayed"): outcome(1.0)})
