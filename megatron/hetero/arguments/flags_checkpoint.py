"""Megatron's checkpoint flags; ours for how many to keep and whether a failed save ends the run."""

import argparse

from hetero.text import integer, interval, text

EXIT_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")


def add_checkpoint_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints")
    _add_save_flags(group)
    _add_load_flags(group)
    _add_format_flags(group)


def _add_save_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--save", type=text, help="folder to write checkpoints to")
    group.add_argument(
        "--save-interval",
        "--persistent-save-interval",
        type=interval,
        help="steps between checkpoints",
    )
    group.add_argument(
        "--save-retain-interval",
        type=interval,
        help="keep checkpoints at multiples of this step, and of others the newest",
    )
    group.add_argument(
        "--keep-last",
        type=integer(1),
        metavar="N",
        help="keep the newest N checkpoints; default: all",
    )
    group.add_argument(
        "--exit-on-save-failure",
        action="store_true",
        help="end the run if a checkpoint cannot be written; otherwise it continues with a warning",
    )
    group.add_argument(
        "--exit-signal-handler",
        action="store_true",
        help="on SIGTERM, SIGINT, SIGHUP and --exit-signal finish the step, save, exit with 0",
    )
    group.add_argument(
        "--exit-signal",
        choices=EXIT_SIGNALS,
        default="SIGTERM",
        help="a further signal of --exit-signal-handler",
    )
    group.add_argument(
        "--exit-signal-handler-for-dataloader",
        action="store_true",
        help="data workers leave these signals to their rank; they do so without it too",
    )


def _add_load_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--load", type=text, help="folder to read a checkpoint from")
    group.add_argument(
        "--ckpt-step", type=integer(0), help="step of the checkpoint to load; default: the latest"
    )
    group.add_argument(
        "--pretrained-checkpoint",
        type=text,
        help="folder of initial weights, if --load has no checkpoint",
    )
    group.add_argument(
        "--finetune", action="store_true", help="load the weights alone, and start at iteration 0"
    )
    for what, state in (("optim", "the optimizer's state"), ("rng", "random states")):
        for verb in ("save", "load"):
            group.add_argument(
                f"--no-{verb}-{what}",
                action="store_true",
                default=None,
                help=f"do not {verb} {state}",
            )
    group.add_argument(
        "--use-checkpoint-args",
        action="store_true",
        help="take flags of the model that are not typed from the checkpoint",
    )
    group.add_argument(
        "--exit-on-missing-checkpoint",
        action="store_true",
        help="end the run if --load has no checkpoint",
    )


def _add_format_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--async-save", action="store_true", help="write checkpoints in the background"
    )
