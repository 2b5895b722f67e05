"""Flags for what one run does: batches, length, precision, recomputation, evaluation."""

import argparse

from hetero.plan.plan import FP8_FORMATS
from hetero.text import integer, interval, number
from megatron.hetero.arguments.batch import step_schedule

MOST_SEED = 2**32 - 2**20
"""numpy's seeds have 32 bits, and each pipeline stage adds 100 times its number."""

FP8_RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8", "custom")
"""Megatron-LM's, and rowwise."""


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    _add_batch_flags(parser.add_argument_group("batch"))
    _add_length_flags(parser.add_argument_group("length of the run"))
    _add_precision_flags(parser.add_argument_group("precision"))
    _add_fp8_flags(parser.add_argument_group("8-bit floating point"))
    _add_recompute_flags(parser.add_argument_group("recomputation"))
    _add_evaluation_flags(parser.add_argument_group("evaluation"))
    _add_care_flags(parser.add_argument_group("reproducibility and memory"))


def _add_batch_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--micro-batch-size", type=integer(1), help="sequences of one forward pass")
    group.add_argument(
        "--global-batch-size",
        type=integer(1),
        help="sequences of one optimizer step; default: micro-batch x data-parallel size",
    )
    group.add_argument(
        "--rampup-batch-size",
        type=integer(1),
        nargs=3,
        metavar=("START", "STEP", "SAMPLES"),
        help="grow the global batch from START by STEP over SAMPLES",
    )
    group.add_argument(
        "--step-batch-size-schedule",
        type=step_schedule,
        metavar="TOKENS:BATCH,...",
        help="the global batch from so many tokens on, as in 0:768,250B:1536; the last one is "
        "--global-batch-size",
    )
    group.add_argument(
        "--calculate-per-token-loss",
        action="store_true",
        help="weigh every token equally, not every micro batch",
    )


def _add_length_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--train-iters", type=integer(1), help="optimizer steps of the whole run")
    group.add_argument("--train-samples", type=integer(1), help="sequences of the whole run")
    group.add_argument("--exit-interval", type=interval, help="stop at a multiple of this step")
    group.add_argument(
        "--exit-duration-in-mins",
        type=interval,
        help="stop so many minutes after the program began",
    )


def _add_precision_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--bf16", action="store_true", help="train in bfloat16")
    group.add_argument("--fp16", action="store_true", help="train in float16, with a loss scale")
    group.add_argument(
        "--loss-scale", type=number(above=0), help="fixed loss scale; default: dynamic"
    )
    group.add_argument(
        "--initial-loss-scale",
        type=number(above=0),
        default=2.0**32,
        help="initial value of a dynamic loss scale",
    )
    group.add_argument(
        "--min-loss-scale",
        type=number(above=0),
        default=1.0,
        help="lowest value of a dynamic loss scale",
    )
    group.add_argument(
        "--loss-scale-window",
        type=number(above=0),
        default=1000.0,
        help="steps without overflow before a dynamic loss scale grows",
    )
    group.add_argument(
        "--hysteresis",
        type=integer(1),
        default=2,
        help="steps with overflow before a dynamic loss scale shrinks",
    )
    group.add_argument(
        "--fp32-residual-connection", action="store_true", help="residual stream in float32"
    )
    group.add_argument(
        "--accumulate-allreduce-grads-in-fp32",
        action="store_true",
        help="sum gradients in float32; --bf16 turns it on",
    )
    group.add_argument(
        "--grad-reduce-in-bf16", action="store_true", help="sum gradients in bfloat16"
    )
    group.add_argument(
        "--fp16-lm-cross-entropy", action="store_true", help="loss in float16; needs --fp16"
    )


def _add_fp8_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--fp8-format",
        choices=FP8_FORMATS,
        help="compute linear layers in fp8: e4m3, or hybrid, whose gradients are e5m2; default: "
        "bf16",
    )
    group.add_argument(
        "--fp8-recipe",
        choices=FP8_RECIPES,
        default="delayed",
        help="what is scaled at a time, see docs/fp8.md; default: delayed",
    )
    group.add_argument(
        "--fp8-amax-history-len",
        type=integer(1),
        default=1,
        help="delayed: steps whose maxima are kept; default: 1",
    )
    group.add_argument(
        "--fp8-amax-compute-algo",
        choices=("most_recent", "max"),
        default="most_recent",
        help="delayed: the last step's maximum, or the largest of those kept; default: most_recent",
    )
    group.add_argument(
        "--fp8-margin",
        type=integer(0),
        default=0,
        help="delayed: number of powers of two left free above the maximum; default: 0",
    )
    group.add_argument(
        "--no-fp8-wgrad",
        "--disable-fp8-wgrad",
        dest="fp8_wgrad",
        action="store_false",
        help="weight gradients in bf16",
    )
    group.add_argument(
        "--fp8-param-gather",
        action="store_true",
        help="without effect: weights are gathered in bf16, and cast then",
    )
    group.add_argument(
        "--first-last-layers-bf16",
        action="store_true",
        help="leave the first and last layers of the model in bf16",
    )
    for end in ("start", "end"):
        group.add_argument(
            f"--num-layers-at-{end}-in-bf16",
            type=integer(0),
            default=1,
            help=f"how many at the {end}; default: 1",
        )


def _add_recompute_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--recompute-activations",
        action="store_true",
        help="short for --recompute-granularity selective",
    )
    group.add_argument(
        "--recompute-granularity",
        choices=("full", "selective"),
        help="recompute whole layers, or modules of them",
    )
    group.add_argument(
        "--recompute-method", choices=("uniform", "block"), help="which layers to recompute"
    )
    group.add_argument("--recompute-num-layers", type=integer(1), help="layers per unit or stage")
    group.add_argument(
        "--recompute-modules",
        nargs="+",
        help="selective: core_attn, mlp (without bias), layernorm (with TransformerEngine); left "
        "out: core_attn",
    )
    group.add_argument(
        "--distribute-saved-activations",
        action="store_true",
        help="split saved activations over the tensor-parallel group",
    )


def _add_evaluation_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--eval-iters",
        type=integer(-1),
        default=100,
        help="batches of one evaluation; 0 or -1: none",
    )
    group.add_argument(
        "--eval-interval", type=interval, default=1000, help="steps between evaluations"
    )
    group.add_argument(
        "--eval-global-batch-size",
        type=integer(1),
        help="sequences of one batch of an evaluation; default: --global-batch-size",
    )
    group.add_argument(
        "--eval-micro-batch-size",
        type=integer(1),
        help="sequences of its forward pass; default: --micro-batch-size",
    )
    group.add_argument("--skip-train", action="store_true", help="evaluate only")


def _add_care_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--check-weight-hash-across-dp-replicas-interval",
        type=interval,
        help="steps between comparisons, bit for bit, of the weights that several ranks hold: "
        "replicas of one vendor or two, tensor-parallel ranks, tied embeddings; and then before "
        "each save; default: none",
    )
    group.add_argument(
        "--seed",
        type=integer(1, maximum=MOST_SEED),
        default=1234,
        help="seed of all random numbers",
    )
    group.add_argument(
        "--deterministic-mode", action="store_true", help="only kernels that repeat bit for bit"
    )
    group.add_argument(
        "--no-check-for-nan-in-loss-and-grad",
        dest="check_for_nan_in_loss_and_grad",
        action="store_false",
        help="continue if the loss or a gradient is not finite",
    )
    group.add_argument(
        "--empty-unused-memory-level",
        type=int,
        choices=(0, 1, 2),
        default=0,
        help="release cached GPU memory: never, after a step, before and after it",
    )
    group.add_argument(
        "--manual-gc",
        action="store_true",
        help="run Python's garbage collection on all ranks at once",
    )
    group.add_argument(
        "--manual-gc-interval", type=integer(0), default=0, help="steps between collections"
    )
