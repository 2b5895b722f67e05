"""What the parity benchmark trains: models of the stated size, and runs that are comparable."""

from __future__ import annotations

from argparse import Namespace

import pytest

from bench.parity_benchmark.parity_runs import (
    DETERMINISTIC,
    FAST,
    LLAMA_8B,
    LLAMA_113M,
    SETTINGS,
    Run,
    Setting,
    parsed_run,
    planned_runs,
)
from bench.real_text.data_set import VOCABULARY
from hetero.planner.model_shape import model_shape


def parsed(setting: Setting, run: Run, *extra: str) -> Namespace:
    return parsed_run(setting, run, iterations=setting.iterations, extra=extra)


def test_the_small_model_has_a_hundred_million_parameters_beside_its_embedding() -> None:
    args = parsed(LLAMA_113M, Run(FAST, "homogeneous", 1))
    shape = model_shape(args, vocabulary=VOCABULARY)
    assert shape.layers * shape.layer_parameters > 100e6
    assert shape.parameters == pytest.approx(113e6, rel=0.01)
    assert (args.global_batch_size, args.seq_length, args.train_iters) == (32, 1024, 500)


def test_the_large_model_is_llama_8b_split_as_published() -> None:
    args = parsed(LLAMA_8B, Run(DETERMINISTIC, "device-direct", 1))
    assert model_shape(args).parameters == pytest.approx(8.03e9, 1e-3)
    assert args.hetero_pipeline_layers == [17, 15]
    assert (args.global_batch_size, args.micro_batch_size, args.seq_length) == (8, 1, 4096)
    assert args.train_iters == 50


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_every_run_is_a_command_line_of_the_program(setting: Setting) -> None:
    for run in planned_runs(setting.kernels, setting.transports):
        args = parsed(setting, run)
        assert args.bf16
        assert args.pipeline_model_parallel_size == 2
        assert args.data_parallel_size == 1
        assert args.seed == run.seed
        assert args.hetero_pipeline == (run.transport != "homogeneous")
        assert args.deterministic_mode == (run.kernels == DETERMINISTIC)
        assert args.cross_entropy_loss_fusion == (run.kernels == FAST)


def test_the_default_is_nine_runs_the_slow_ones_first() -> None:
    runs = list(planned_runs(LLAMA_113M.kernels, LLAMA_113M.transports))
    assert [run.name for run in runs] == [
        "deterministic, homogeneous, seed 1",
        "deterministic, device-direct, seed 1",
        "deterministic, cpu-forward, seed 1",
        "fast, homogeneous, seed 1",
        "fast, device-direct, seed 1",
        "fast, cpu-forward, seed 1",
        "fast, homogeneous, seed 2",
        "fast, homogeneous, seed 3",
        "fast, homogeneous, seed 1, again",
    ]
    assert [run.is_reference for run in runs] == [n in (0, 3) for n in range(9)]
    assert len({run.file_stem for run in runs}) == 9


def test_runs_of_one_kind_of_kernels_differ_in_transport_and_seed_alone() -> None:
    reference, *others = (
        vars(parsed(LLAMA_113M, run)) for run in planned_runs([FAST], ["gloo", "cpu-forward"])
    )
    differing = {name for other in others for name in other if other[name] != reference[name]}
    assert differing - {"typed_flags"} == {
        *("seed", "hetero_transport", "hetero_pipeline", "hetero_vendors"),
        "hetero_pipeline_sizes",
    }


def test_the_users_own_flags_win() -> None:
    args = parsed(LLAMA_113M, Run(FAST, "gloo", 1), "--lr", "1e-4", "--num-layers", "4")
    assert (args.lr, args.num_layers) == (1e-4, 4)
