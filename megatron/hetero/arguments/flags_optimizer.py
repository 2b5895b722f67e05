"""Flags for the optimizer and for how its learning rate and weight decay change."""

import argparse

from hetero.text import integer, number


def add_optimizer_flags(parser: argparse.ArgumentParser) -> None:
    _add_update_flags(parser.add_argument_group("optimizer"))
    _add_learning_rate_flags(parser.add_argument_group("learning rate"))
    _add_weight_decay_flags(parser.add_argument_group("weight decay"))


def _add_update_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--optimizer", choices=("adam", "sgd"), default="adam", help="the optimizer")
    group.add_argument(
        "--clip-grad", type=number(minimum=0), default=1.0, help="gradient norm limit; 0: none"
    )
    betas = number(minimum=0, below=1)
    group.add_argument(
        "--adam-beta1", type=betas, default=0.9, help="decay rate of the first moment"
    )
    group.add_argument(
        "--adam-beta2", type=betas, default=0.999, help="decay rate of the second moment"
    )
    group.add_argument(
        "--adam-eps", type=number(above=0), default=1e-8, help="added to the denominator"
    )
    group.add_argument(
        "--sgd-momentum", type=number(minimum=0, below=1), default=0.9, help="momentum of SGD"
    )
    _add_state_flags(group)


def _add_state_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--use-precision-aware-optimizer",
        action="store_true",
        help="allow --main-grads-dtype; all else of the optimizer stays in float32",
    )
    group.add_argument(
        "--main-grads-dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="dtype of gradients until the update",
    )
    for name, what, halves in (
        ("main-params", "the optimizer's copy of the weights", ("fp16",)),
        ("exp-avg", "Adam's first moment", ("fp16", "bf16", "fp8")),
        ("exp-avg-sq", "Adam's second moment", ("fp16", "bf16", "fp8")),
    ):
        group.add_argument(
            f"--{name}-dtype",
            choices=("fp32", *halves),
            default="fp32",
            help=f"dtype of {what}; only fp32 is offered",
        )


def _add_learning_rate_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--lr", type=number(above=0), help="highest learning rate")
    group.add_argument("--min-lr", type=number(minimum=0), default=0.0, help="lowest after decay")
    group.add_argument(
        "--lr-decay-style",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
        default="linear",
        help="shape of the decay",
    )
    group.add_argument(
        "--lr-decay-iters", type=integer(1), help="steps to decay over; default: the whole run"
    )
    group.add_argument(
        "--lr-decay-samples", type=integer(1), help="samples to decay over; default: the whole run"
    )
    group.add_argument(
        "--lr-warmup-fraction",
        type=number(minimum=0, below=1),
        help="part of the decay length that warms up",
    )
    group.add_argument("--lr-warmup-iters", type=integer(0), default=0, help="steps to warm up")
    group.add_argument("--lr-warmup-samples", type=integer(0), default=0, help="samples to warm up")
    group.add_argument(
        "--lr-warmup-init", type=number(minimum=0), default=0.0, help="where the warm-up starts"
    )
    group.add_argument(
        "--lr-wsd-decay-style",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
        default="exponential",
        help="WSD: shape of the last phase",
    )
    group.add_argument("--lr-wsd-decay-iters", type=integer(1), help="WSD: steps of it")
    group.add_argument("--lr-wsd-decay-samples", type=integer(1), help="WSD: samples of it")
    group.add_argument(
        "--decoupled-lr", type=number(above=0), help="learning rate of embedding and output layer"
    )
    group.add_argument(
        "--decoupled-min-lr", type=number(minimum=0), help="its lowest value; needs --decoupled-lr"
    )
    group.add_argument(
        "--override-opt_param-scheduler",
        "--override-opt-param-scheduler",
        dest="override_opt_param_scheduler",
        action="store_true",
        help="after loading, use the schedule of these flags",
    )
    group.add_argument(
        "--use-checkpoint-opt_param-scheduler",
        "--use-checkpoint-opt-param-scheduler",
        dest="use_checkpoint_opt_param_scheduler",
        action="store_true",
        help="after loading, use the schedule of the checkpoint",
    )


def _add_weight_decay_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--weight-decay", type=number(minimum=0), default=0.01, help="decoupled weight decay"
    )
    group.add_argument(
        "--start-weight-decay", type=number(minimum=0), help="initial value, if weight decay grows"
    )
    group.add_argument(
        "--end-weight-decay", type=number(minimum=0), help="final value, if weight decay grows"
    )
    group.add_argument(
        "--weight-decay-incr-style",
        choices=("constant", "linear", "cosine"),
        default="constant",
        help="how weight decay grows from the first to the last value",
    )
