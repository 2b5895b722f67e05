"""The run: length, batch, precision, recomputation and the schedule of the optimizer."""

import pytest

from megatron.training.arguments.batch_sizes import batch_size_at, samples_after

SAMPLES = {"without": "--train-iters"}


@pytest.mark.parametrize(
    ("flags", "without", "words"),
    [
        ("", "--train-iters", "--train-iters or --train-samples is required"),
        ("--train-samples 100", "", "--train-iters and --train-samples exclude each other"),
        ("--train-samples 1", "--train-iters", "--train-samples 1 is less than one global batch"),
        ("--global-batch-size 3", "", "a global batch of 3 must be a multiple"),
        (
            "--train-samples 99 --global-batch-size 8 --rampup-batch-size 2 2 0",
            "--train-iters",
            "--rampup-batch-size must be a whole number of at least 1",
        ),
        (
            "--train-samples 99 --global-batch-size 8 --rampup-batch-size 2 4 10",
            "--train-iters",
            "must reach --global-batch-size 8 from 2 in steps of 4",
        ),
        (
            "--train-samples 99 --global-batch-size 8 --rampup-batch-size 8 2 10",
            "--train-iters",
            "must reach --global-batch-size 8 from 8",
        ),
        (
            "--train-samples 99 --global-batch-size 8 --rampup-batch-size 2 1 10",
            "--train-iters",
            "a global batch of 3 must be a multiple of --micro-batch-size 2",
        ),
    ],
)
def test_length_and_batch_that_do_not_fit_are_refused(refusal, flags, without, words):
    assert words in refusal(flags, without=without)


def test_global_batch_defaults_to_one_micro_batch_on_every_replica(parse):
    assert parse(world_size=3).global_batch_size == 6
    assert parse("--global-batch-size 12", world_size=3).global_batch_size == 12


def test_samples_become_steps_and_the_last_partial_batch_is_dropped(parse):
    assert parse("--train-samples 21 --global-batch-size 4", **SAMPLES).train_iters == 5


@pytest.mark.parametrize(
    ("samples", "ramp"),
    [(100, (2, 2, 30)), (100, (2, 6, 10)), (11, (2, 2, 30)), (64, (2, 2, 64))],
)
def test_steps_of_a_growing_batch_are_those_of_megatron_core(parse, samples, ramp):
    core = pytest.importorskip("megatron.core.num_microbatches_calculator")
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


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--bf16 --fp16", "--bf16 and --fp16 exclude each other"),
        ("--fp16-lm-cross-entropy", "--fp16-lm-cross-entropy needs --fp16"),
        ("--fp32-residual-connection", "--fp32-residual-connection needs --bf16 or --fp16"),
        ("--fp16 --initial-loss-scale 1 --min-loss-scale 2", "--min-loss-scale 2 must be at most"),
        (
            "--deterministic-mode --cross-entropy-loss-fusion",
            "--cross-entropy-loss-fusion is not deterministic",
        ),
        ("--recompute-granularity full", "needs --recompute-method"),
        (
            "--recompute-activations --recompute-num-layers 1",
            "--recompute-num-layers needs --recompute-granularity full",
        ),
        (
            "--recompute-activations --recompute-granularity full --recompute-method block"
            " --recompute-num-layers 1",
            "--recompute-activations means selective",
        ),
        ("--recompute-activations --recompute-modules xyz", "--recompute-modules cannot be 'xyz'"),
        (
            "--hetero-pipeline --hetero-vendors amd --hetero-pipeline-sizes 1"
            " --hetero-recompute selective --recompute-modules xyz",
            "--recompute-modules cannot be 'xyz'",
        ),
        ("--optimizer sgd --use-distributed-optimizer", "shares out Adam's state alone"),
        ("--main-grads-dtype bf16 --use-precision-aware-optimizer", "needs --bf16"),
        ("--bf16 --main-grads-dtype bf16", "needs --use-precision-aware-optimizer"),
        (
            "--bf16 --main-grads-dtype bf16 --use-precision-aware-optimizer"
            " --accumulate-allreduce-grads-in-fp32",
            "--main-grads-dtype bf16 and --accumulate-allreduce-grads-in-fp32 exclude each other",
        ),
        (
            "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8"
            " --main-params-dtype fp16",
            "--exp-avg-dtype bf16 needs an optimizer of TransformerEngine's",
        ),
        ("--step-batch-size-schedule 0:4,1K:2,1000:6", "must be TOKENS:BATCH pairs"),
        ("--step-batch-size-schedule 0:4,1K:3", "a global batch of 3 must be a multiple"),
        ("--step-batch-size-schedule 0:4,5:6", "twice within one sequence of 32 tokens"),
        (
            "--step-batch-size-schedule 0:4,1K:8 --global-batch-size 6",
            "ends with a batch of 8, but --global-batch-size is 6",
        ),
        (
            "--step-batch-size-schedule 0:4,1K:8 --rampup-batch-size 2 2 8",
            "--step-batch-size-schedule and --rampup-batch-size exclude each other",
        ),
        ("--eval-global-batch-size 3", "a global batch of 3 in evaluation must be a multiple"),
        ("--log-memory-interval 150", "--log-memory-interval 150 must be a multiple of"),
        ("--profile --use-pytorch-profiler", "--use-pytorch-profiler needs --tensorboard-dir"),
        ("--profile --profile-step-start 5 --profile-step-end 5", "5 must be less than"),
        ("--profile --profile-ranks 0 1", "--profile-ranks 1 is none of the run's 1 rank"),
        (
            "--distribute-saved-activations",
            "--distribute-saved-activations needs --recompute-granularity full",
        ),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
            " --distribute-saved-activations",
            "--distribute-saved-activations needs --tensor-model-parallel-size above 1",
        ),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
            " --distribute-saved-activations --sequence-parallel",
            "--distribute-saved-activations and --sequence-parallel exclude each other",
        ),
    ],
)
def test_precision_and_recomputation_that_contradict_are_refused(refusal, flags, words):
    assert words in refusal(flags)


@pytest.mark.parametrize(
    ("flags", "dtype", "fp32_gradients", "nan_check"),
    [
        ("", "float32", False, True),
        ("--bf16", "bfloat16", True, True),
        ("--bf16 --grad-reduce-in-bf16", "bfloat16", False, True),
        ("--fp16", "float16", False, False),
        ("--accumulate-allreduce-grads-in-fp32", "float32", True, True),
    ],
)
def test_what_follows_from_the_precision(parse, flags, dtype, fp32_gradients, nan_check):
    args = parse(flags)
    assert args.params_dtype == dtype
    assert args.accumulate_allreduce_grads_in_fp32 is fp32_gradients
    assert args.check_for_nan_in_loss_and_grad is nan_check


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--min-lr 1e-2", "--min-lr 0.01 must be at most --lr 0.001"),
        ("--decoupled-min-lr 1e-5", "--decoupled-min-lr needs --decoupled-lr"),
        ("--decoupled-lr 1e-5 --decoupled-min-lr 1e-4", "must be at most --decoupled-lr"),
        ("--lr-warmup-iters 10", "--lr-warmup-iters 10 must be less than the 10 iters"),
        (
            "--lr-warmup-fraction 0.1 --lr-warmup-iters 1",
            "--lr-warmup-fraction and --lr-warmup-iters exclude each other",
        ),
        ("--lr-decay-samples 5", "--lr-decay-samples cannot go with --train-iters"),
        ("--lr-decay-style WSD", "--lr-decay-style WSD needs --lr-wsd-decay-iters"),
        (
            "--lr-decay-style WSD --lr-wsd-decay-iters 11",
            "--lr-wsd-decay-iters 11 must be at most the 10 iters",
        ),
        ("--start-weight-decay 0.1", "--start-weight-decay needs --weight-decay-incr-style"),
        (
            "--weight-decay-incr-style cosine --start-weight-decay 0.1",
            "needs both --start-weight-decay and --end-weight-decay",
        ),
        (
            "--weight-decay-incr-style linear --start-weight-decay 0.2 --end-weight-decay 0.1",
            "--start-weight-decay 0.2 must be at most --end-weight-decay 0.1",
        ),
        (
            "--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler",
            "exclude each other",
        ),
    ],
)
def test_schedule_that_does_not_fit_is_refused(refusal, flags, words):
    assert words in refusal(flags)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--lr-warmup-iters 2", "--lr-warmup-iters cannot go with --train-samples"),
        ("--lr-warmup-samples 100", "--lr-warmup-samples 100 must be less than the 100 samples"),
        ("--lr-decay-style WSD", "needs --lr-wsd-decay-samples"),
    ],
)
def test_schedule_of_a_run_counted_in_samples_is_counted_in_samples(refusal, flags, words):
    assert words in refusal(f"--train-samples 100 {flags}", **SAMPLES)


def test_a_run_counted_in_steps_can_ramp_up_too(parse):
    """Batches of 2, then of 4, four samples of each, and of 6 from the eighth sample on."""
    args = parse("--global-batch-size 6 --rampup-batch-size 2 2 8")
    assert args.train_iters == 10
    assert [samples_after(args, steps) for steps in range(6)] == [0, 2, 4, 8, 14, 20]


def test_samples_and_steps_of_a_ramp_up_agree(parse):
    flags = "--global-batch-size 10 --rampup-batch-size 2 2 50"
    for steps in (20, 21, 30):
        samples = samples_after(parse(flags), steps)
        counted = parse(f"{flags} --train-samples {samples}", without="--train-iters")
        assert counted.train_iters == steps


def test_megatron_writes_minus_one_for_no_evaluation(parse, refusal):
    assert parse("--eval-iters -1").eval_iters == 0
    assert "--eval-iters must be" in refusal("--eval-iters -2")


@pytest.mark.parametrize(
    ("flags", "needed"),
    [
        ("--use-pytorch-profiler", "--profile"),
        ("--exit-signal SIGUSR1", "--exit-signal-handler"),
        ("--log-timers-to-tensorboard", "--timing-log-level 1 or 2"),
        ("--exp-avg-dtype bf16", "--use-precision-aware-optimizer"),
    ],
)
def test_a_flag_of_another_does_nothing_by_itself(parse, flags, needed):
    assert parse(flags).ignored_flags == [f"{flags.split()[0]}: it needs {needed}"]


def test_the_mlp_is_not_recomputed_with_biases(parse, refusal):
    flags = "--recompute-activations --recompute-modules mlp"
    assert refusal(flags) == "--recompute-modules mlp needs --disable-bias-linear"
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


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("--recompute-method uniform --recompute-num-layers 1", "recompute_method"),
        ("--recompute-modules mlp", "recompute_modules"),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
            " --recompute-modules mlp",
            "recompute_modules",
        ),
    ],
)
def test_how_to_recompute_means_nothing_where_nothing_like_it_is_recomputed(parse, flags, name):
    args = parse(flags)
    assert getattr(args, name) is None
    assert any(line.startswith(f"--{name.replace('_', '-')}: ") for line in args.ignored_flags)


def test_beside_whole_layers_the_modules_are_those_of_a_mesh_that_recomputes_parts(parse):
    args = parse(
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
        "--recompute-modules core_attn --hetero-pipeline --hetero-vendors nvidia amd "
        "--hetero-pipeline-sizes 1 1 --hetero-recompute selective full",
        world_size=2,
    )
    assert args.recompute_modules == ["core_attn"]
    assert args.ignored_flags == []


def test_gradients_are_kept_in_bfloat16_where_the_optimizer_may(parse):
    flags = "--bf16 --use-precision-aware-optimizer"
    assert parse(flags).accumulate_allreduce_grads_in_fp32 is True
    assert parse(f"{flags} --main-grads-dtype bf16").accumulate_allreduce_grads_in_fp32 is False


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


@pytest.mark.parametrize("flag", ["--save-interval", "--eval-interval"])
def test_an_interval_of_0_is_never(parse, flag):
    assert getattr(parse(f"{flag} 0"), flag[2:].replace("-", "_")) is None
