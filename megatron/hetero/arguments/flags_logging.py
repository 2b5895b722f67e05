"""Flags of logging, profiling and metrics."""

import argparse

from hetero.text import integer, interval, text


def add_logging_flags(parser: argparse.ArgumentParser) -> None:
    _add_console_flags(parser.add_argument_group("log"))
    _add_tensorboard_flags(parser.add_argument_group("TensorBoard and W&B"))
    _add_profiler_flags(parser.add_argument_group("profiler"))
    _add_straggler_flags(parser.add_argument_group("stragglers"))
    _add_telemetry_flags(parser.add_argument_group("OpenTelemetry"))


def _add_console_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--log-interval", type=integer(1), default=100, help="steps between lines of the log"
    )
    group.add_argument("--log-params-norm", action="store_true", help="norm of the parameters")
    group.add_argument(
        "--log-num-zeros-in-grad", action="store_true", help="count of zeros in the gradient"
    )
    group.add_argument("--log-memory-interval", type=interval, help="steps between memory lines")
    group.add_argument(
        "--log-device-memory-used",
        action="store_true",
        help="include the memory that the driver reports",
    )
    group.add_argument(
        "--timing-log-level",
        type=int,
        choices=(0, 1, 2),
        default=0,
        help="parts of an iteration to time: none, those that occur once, or all and waits",
    )
    group.add_argument(
        "--timing-log-option",
        choices=("max", "minmax", "all"),
        default="minmax",
        help="show each timer's maximum, its minimum and maximum, or all ranks",
    )
    group.add_argument(
        "--metrics-file",
        type=text,
        metavar="FILE",
        help="append the numbers of every logged step, one JSON object a line",
    )


def _add_tensorboard_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--tensorboard-dir", type=text, help="folder for TensorBoard")
    group.add_argument(
        "--tensorboard-log-interval", type=integer(1), default=1, help="steps between points"
    )
    group.add_argument(
        "--tensorboard-queue-size", type=integer(1), default=1000, help="points held in memory"
    )
    for name, what in (
        ("timers", "timers"),
        ("validation-ppl", "perplexity of the validation set"),
        ("memory", "memory"),
        ("world-size", "the number of ranks"),
    ):
        group.add_argument(
            f"--log-{name}-to-tensorboard", action="store_true", help=f"write {what}"
        )
    group.add_argument(
        "--no-log-loss-scale-to-tensorboard",
        "--disable-log-loss-scale-to-tensorboard",
        dest="log_loss_scale_to_tensorboard",
        action="store_false",
        help="do not write the loss scale",
    )
    # Megatron's default of these four is the empty word: scripts pass on variables that are unset.
    group.add_argument(
        "--wandb-project", type=str, help="W&B project; turns W&B on, unless it is empty"
    )
    group.add_argument(
        "--wandb-exp-name", type=str, help="W&B name of the run; default: W&B chooses one"
    )
    group.add_argument("--wandb-save-dir", type=str, help="folder for W&B's local files")
    group.add_argument("--wandb-entity", type=str, help="W&B user or team")


def _add_profiler_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--profile",
        action="store_true",
        help="profile some steps: nsys with --capture-range=cudaProfilerApi, or torch's profiler",
    )
    group.add_argument(
        "--use-pytorch-profiler",
        action="store_true",
        help="profile with torch; the traces go to --tensorboard-dir",
    )
    group.add_argument(
        "--profile-step-start",
        type=integer(0),
        default=10,
        help="number of steps before the first profiled",
    )
    group.add_argument(
        "--profile-step-end",
        type=integer(1),
        default=12,
        help="number of steps up to the last profiled",
    )
    group.add_argument(
        "--profile-ranks", nargs="+", type=integer(0), default=[0], help="ranks to profile"
    )


def _add_straggler_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--log-straggler",
        action="store_true",
        help="log the slowest and the fastest ranks, by time of the forward passes",
    )
    group.add_argument(
        "--disable-straggler-on-startup",
        action="store_true",
        help="do not log stragglers until a request to --straggler-ctrlr-port",
    )
    group.add_argument(
        "--straggler-ctrlr-port",
        type=integer(0, maximum=65535),
        default=65535,
        help="port on rank 0: each HTTP GET switches --log-straggler on or off; 0: a free one",
    )
    group.add_argument(
        "--straggler-minmax-count",
        type=integer(1),
        default=1,
        help="number of slowest and of fastest ranks to list",
    )


def _add_telemetry_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--otel-enabled",
        action="store_true",
        help="export spans with OTLP over HTTP, to OTEL_EXPORTER_OTLP_ENDPOINT",
    )
    group.add_argument(
        "--otel-service-name",
        type=text,
        help="instead of OTEL_SERVICE_NAME; without both: megatron-training",
    )
    group.add_argument(
        "--otel-span-groups",
        type=text,
        metavar="GROUPS",
        help="presets or groups of spans with commas between; default: all",
    )
