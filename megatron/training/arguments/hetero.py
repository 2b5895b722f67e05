"""Flags of this project: pipeline stages on more than one vendor. All start with `--hetero-`."""

import argparse

from megatron.training.arguments.convert import integer, number, text

VENDORS = ("nvidia", "amd", "cpu")
# Every transport that has its code; `auto` and the channel join as they arrive.
TRANSPORTS = ("gloo", "nccl")
# Make sense in a homogeneous run too: the baseline needs a report to be compared with.
ALLOWED_WITHOUT_PIPELINE = frozenset({"--hetero-pipeline", "--hetero-report"})


def add_hetero_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("heterogeneous pipeline")
    group.add_argument(
        "--hetero-pipeline", action="store_true", help="place pipeline stages across vendors"
    )
    group.add_argument(
        "--hetero-plan",
        type=text,
        metavar="FILE",
        help="YAML plan; instead of the three flags that follow",
    )
    group.add_argument(
        "--hetero-vendors",
        nargs="+",
        choices=VENDORS,
        help="vendor of each mesh, in pipeline order",
    )
    group.add_argument(
        "--hetero-pipeline-sizes", nargs="+", type=integer(1), help="pipeline stages in each mesh"
    )
    group.add_argument(
        "--hetero-pipeline-layers",
        nargs="+",
        type=integer(0),
        help="layers of each pipeline stage; when interleaved, of each model chunk in layer order",
    )
    group.add_argument(
        "--hetero-transport",
        choices=TRANSPORTS,
        default="gloo",
        help="how tensors cross a boundary between vendors",
    )
    group.add_argument(
        "--hetero-timeout",
        type=number(above=0),
        default=600.0,
        metavar="SECONDS",
        help="a transfer blocked for longer is an error",
    )
    group.add_argument(
        "--hetero-report",
        type=text,
        metavar="FILE",
        help="write at the end, as JSON, what the run was",
    )
