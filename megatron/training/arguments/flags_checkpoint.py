"""Megatron's checkpoint flags; ours for how many to keep and whether a failed save ends the run."""

import argparse

from megatron.training.arguments.converters import integer, interval, text

EXIT_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")


def add_checkpoint_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints")
    group.add_argument("--save", type=text, help="folder to write checkpoints to")
    group.add_argument(
        "--save-interval", "--persistent-save-interval", type=interval, help="steps between them"
    )
    group.add_argument(
        "--save-retain-interval", type=interval, help="keep those at multiples of this step"
    )
    group.add_argument(
        "--keep-last", type=integer(1), metavar="N", help="keep so many of the newest; else all"
    )
    group.add_argument(
        "--exit-on-save-failure",
        action="store_true",
        help="end the run when a checkpoint cannot be written; else it goes on and says so",
    )
    group.add_argument(
        "--exit-signal-handler",
        action="store_true",
        help="on --exit-signal finish the step, save, and exit with 0",
    )
    group.add_argument(
        "--exit-signal", choices=EXIT_SIGNALS, default="SIGTERM", help="what asks for it"
    )
    group.add_argument("--load", type=text, help="folder to read a checkpoint from")
    group.add_argument("--ckpt-step", type=integer(0), help="step to read; left out: the latest")
    group.add_argument(
        "--pretrained-checkpoint", type=text, help="folder to take first weights from"
    )
    group.add_argument("--finetune", action="store_true", help="take the weights and nothing else")
    for what in ("save-optim", "save-rng", "load-optim", "load-rng"):
        group.add_argument(
            f"--no-{what}",
            action="store_true",
            default=None,
            help=f"do not {what.split('-')[0]} it",
        )
    group.add_argument(
        "--use-checkpoint-args",
        action="store_true",
        help="take the model from it, as far as it is not typed",
    )
    group.add_argument(
        "--exit-on-missing-checkpoint", action="store_true", help="no fresh start without one"
    )
    group.add_argument(
        "--ckpt-format",
        choices=("torch", "torch_dist", "torch_dcp", "fsdp_dtensor", "zarr"),
        default="torch_dist",
        help="on disk",
    )
    group.add_argument(
        "--auto-detect-ckpt-format", action="store_true", help="find the format when reading"
    )
    group.add_argument("--async-save", action="store_true", help="write in the background")
    group.add_argument(
        "--no-ckpt-fully-parallel-save",
        "--disable-ckpt-fully-parallel-save",
        dest="ckpt_fully_parallel_save",
        action="store_false",
        help="write from one data-parallel rank",
    )
    group.add_argument(
        "--ckpt-fully-parallel-load", action="store_true", help="share the reading among ranks"
    )
    group.add_argument(
        "--ckpt-assume-constant-structure", action="store_true", help="reuse the plan of a save"
    )
    group.add_argument(
        "--dist-ckpt-strictness",
        default="assume_ok_unexpected",
        choices=(
            "assume_ok_unexpected",
            "log_unexpected",
            "log_all",
            "raise_unexpected",
            "raise_all",
            "return_unexpected",
            "return_all",
            "ignore_all",
        ),
        help="what to do about keys that do not match",
    )
