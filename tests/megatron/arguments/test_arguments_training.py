"""The run: length, batch, precision, recomputation and the schedule of the optimizer."""

import pytest

from megatron.hetero.arguments.batch import batch_size_at, samples_after, steps_of

SAMPLES = {"without": "--train-iters"}


@pytest.mark.parametrize(
    ("samples", "ramp"),
    [(100, (2, 2, 30)), (100, (2, 6, 10)), (11, (2, 2, 30)), (64, (2, 2, 64))],
)
def test_steps_of_a_growing_batch_are_those_of_megatron_core(parse, samples, ramp):
    core = pytest.importorskip("megatron.core.num_microbatches_calculator")
    if not hasattr(core, "RampupBatchsizeNumMicroBatchesCalculator"):
        pytest.skip("megatron-core 0.18 and later grow the batch in other steps")
    start, step, ramp_samples = ramp
    flags = f"--train-samples {samples} --global-batch-size 8 --rampup-batch-size"
    args = parse(f"{flags} {start} {step} {ramp_samples}", **SAMPLES)
    calculator = core.RampupBatchsizeNumMicroBatchesCalculator(
        global_batch_size=8,
        micro_batch_size=2,
        data_parallel_size=1,
        decrease_batch_size_if_needed=False,
        rank=1,
        start_global_batch_size=start,
        batch_size_increment=step,
        ramup_samples=ramp_samples,
    )
    steps = consumed = 0
    while consumed <= ramp_samples and consumed <= samples:
        calculator.update(consumed, consistency_check=True)
        consumed += calculator.get_current_global_batch_size()
        steps += 1
    assert args.train_iters == steps + max(samples - consumed, 0) // 8


def test_samples_and_steps_of_a_ramp_up_agree(parse):
    flags = "--global-batch-size 10 --rampup-batch-size 2 2 50"
    for steps in (20, 21, 30):
        samples = samples_after(parse(flags), steps)
        counted = parse(f"{flags} --train-samples {samples}", without="--train-iters")
        assert counted.train_iters == steps


def test_the_mlp_is_recomputed_without_biases(parse):
    flags = "--recompute-activations --recompute-modules mlp"
    assert parse(f"{flags} --disable-bias-linear").recompute_modules == ["mlp"]


def test_norms_are_recomputed_by_transformer_engine_alone(parse, engine):
    flags = "--recompute-activations --recompute-modules layernorm"
    assert parse(f"{flags} --transformer-impl transformer_engine").recompute_modules == [
        "layernorm"
    ]
    args = parse(f"{flags} core_attn moe_act")
    assert args.recompute_modules == ["core_attn"]
    assert len(args.ignored_flags) == 2
    assert parse(flags).recompute_granularity is None


SCHEDULE = "--step-batch-size-schedule"


@pytest.mark.parametrize("text", ["0:2,320:4,0.64K:8", "'0:2 0.32k:4 640:8'", "0:2,0.64K:8,320:4"])
def test_a_schedule_sets_the_batch_by_the_tokens_so_far(parse, text):
    args = parse(f"{SCHEDULE} {text}")
    assert args.global_batch_size == 8
    # 32 tokens a sample: steps at 10 and 20 samples.
    sizes = [batch_size_at(args, consumed) for consumed in (0, 8, 9, 10, 18, 19, 20, 99)]
    assert sizes == [2, 2, 2, 4, 4, 4, 8, 8]
    assert [samples_after(args, steps) for steps in (0, 1, 5, 6, 8, 9, 10)] == [
        *(0, 2, 10, 14, 22, 30, 38)
    ]


def test_steps_of_samples_follow_the_schedule_and_drop_what_is_left(parse):
    args = parse(f"{SCHEDULE} 0:2,320:4,640:8 --train-samples 40", **SAMPLES)
    assert args.train_iters == 10
    assert samples_after(args, args.train_iters) == 38


@pytest.mark.parametrize(("ramp", "steps"), [("", 12), ("--rampup-batch-size 2 2 41", 20)])
def test_a_last_batch_that_is_not_whole_is_dropped(parse, ramp, steps):
    args = parse(f"--global-batch-size 8 --train-samples 100 {ramp}", **SAMPLES)
    assert args.train_iters == steps
    consumed = samples_after(args, steps)
    assert consumed <= 100 < consumed + batch_size_at(args, consumed)


def test_steps_are_counted_from_where_a_run_resumes(parse):
    args = parse(f"{SCHEDULE} 0:2,320:4,640:8 --train-samples 40", **SAMPLES)
    # Batches of 2, 4, 4, 4, 8 and 8 samples.
    assert steps_of(args, consumed=9) == 6
    assert samples_after(args, 6, consumed=9) == 39
    assert [steps_of(args, consumed=consumed) for consumed in (33, 40, 50)] == [0, 0, 0]
