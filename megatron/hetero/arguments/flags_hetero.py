"""The --hetero- flags, which train one model on several vendors."""

import argparse
from collections.abc import Callable

from hetero.link import TRANSPORTS
from hetero.native.binding import ENGINE_RAILS
from hetero.plan import VENDORS
from hetero.plan.plan import RECOMPUTE
from hetero.text import integer, interval, number, seconds, text

# Valid in a homogeneous run too: the baseline of a comparison needs a report.
ALLOWED_WITHOUT_PIPELINE = frozenset(
    {"--hetero-pipeline", "--hetero-report", "--hetero-trace", "--hetero-trace-steps"}
    | {"--hetero-flight-recorder", "--hetero-stall-warning"}
    | {"--hetero-metrics-port", "--hetero-metrics-address"}
    | {"--hetero-check-operators", "--hetero-operator-cases"}
    | {"--hetero-memory-checkpoint-interval"}
)
DATA_PARALLEL = frozenset({"--hetero-data-parallel", "--hetero-data-shares"})
CASES = "operator_cases"
"""The folder of --hetero-operator-cases where it is left out."""
MEASURED: tuple[int, ...] = ()
"""The value of --hetero-data-shares auto until shares are measured. Until then they are equal."""
# Valid with data parallelism across vendors as well as with a pipeline across them.
ALLOWED_WITH_DATA_PARALLEL = DATA_PARALLEL | {"--hetero-nics", "--hetero-timeout"}


def replicas_by_vendor(text: str) -> tuple[tuple[str, int], ...]:
    """Convert the numbers of replicas of vendors, such as 'nvidia:2,amd:2'."""
    replicas = []
    for word in text.split(","):
        vendor, colon, count = word.strip().partition(":")
        if vendor not in VENDORS or not colon or not count.isdecimal() or int(count) < 1:
            raise argparse.ArgumentTypeError(
                "must be VENDOR:REPLICAS pairs with commas between, such as nvidia:2,amd:2 (the "
                f"vendors are {', '.join(VENDORS)}), not {text!r}"
            )
        replicas.append((vendor, int(count)))
    return tuple(replicas)


def first_and_last(text: str) -> tuple[int, int]:
    """Convert a range of iterations, such as '20-22', or one, such as '20'."""
    first, dash, last = text.strip().partition("-")
    ends = (first, last if dash else first)
    if not all(end.isascii() and end.isdecimal() for end in ends) or not (
        1 <= int(ends[0]) <= int(ends[1])
    ):
        raise argparse.ArgumentTypeError(
            "must be the first and the last iteration, counted from 1, with a hyphen between, such "
            f"as 20-22, not {text!r}"
        )
    return int(ends[0]), int(ends[1])


def list_of(convert: Callable[[str], int]) -> Callable[[str], tuple[int, ...]]:
    """Make a converter for values separated by commas."""
    return lambda text: tuple(convert(word.strip()) for word in text.split(","))


def add_hetero_flags(parser: argparse.ArgumentParser) -> None:
    _add_data_parallel_flags(parser.add_argument_group("heterogeneous data parallelism"))
    group = parser.add_argument_group("heterogeneous pipeline")
    group.add_argument(
        "--hetero-pipeline", action="store_true", help="place pipeline stages across vendors"
    )
    group.add_argument(
        "--hetero-plan",
        type=text,
        metavar="FILE",
        help="YAML plan; instead of the nine flags that follow",
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
        help="layers of each pipeline stage, or of each model chunk in layer order",
    )
    _add_mesh_flags(group)
    _add_link_flags(group)
    group.add_argument(
        "--hetero-report",
        type=text,
        metavar="FILE",
        help="JSON file for a report, written at the end of the run",
    )
    group.add_argument(
        "--hetero-memory-checkpoint-interval",
        type=interval,
        metavar="STEPS",
        help="steps between copies of the state to the memory of the launchers, from which a "
        "restart resumes; default: no copies",
    )
    group.add_argument(
        "--hetero-flight-recorder",
        type=text,
        metavar="FOLDER",
        help="folder for each rank's last collectives, sends and receives, written when a group or "
        "link fails or is near its timeout, and on SIGUSR2; default: flight_recorder",
    )
    group.add_argument(
        "--hetero-stall-warning",
        type=number(minimum=0, maximum=1e9),
        metavar="SECONDS",
        help="seconds without progress, or ten steps where that is shorter, after which a warning "
        "says who holds the run up; 0: never; default: 60",
    )
    group.add_argument(
        "--hetero-trace",
        type=text,
        metavar="FOLDER",
        help="folder for trace.json.gz, which shows the traced steps of all ranks in Perfetto and "
        "to `hetero trace`",
    )
    group.add_argument(
        "--hetero-trace-steps",
        type=first_and_last,
        metavar="FIRST-LAST",
        help="the iterations that --hetero-trace records, such as 20-22",
    )
    group.add_argument(
        "--hetero-metrics-port",
        type=integer(0, maximum=65535),
        metavar="PORT",
        help="port of rank 0 that shows the run while it runs: a page, /state for `hetero top` and "
        "/metrics for Prometheus; 0: any free one, which is printed",
    )
    group.add_argument(
        "--hetero-metrics-address",
        type=text,
        metavar="ADDRESS",
        help="address of rank 0's host to show it on, 0.0.0.0 for all; default: 127.0.0.1, which "
        "only programs of that host reach",
    )
    group.add_argument(
        "--hetero-check-operators",
        type=integer(0),
        default=0,
        metavar="N",
        help="compare the operators of one layer of each stage with float64 every N iterations; "
        "0: never",
    )
    group.add_argument(
        "--hetero-operator-cases",
        type=text,
        metavar="FOLDER",
        help="folder for the inputs and outputs of operators that --hetero-check-operators finds "
        f"wrong, for `hetero compare-ops case`; default: {CASES}",
    )


def _add_link_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--hetero-transport",
        choices=TRANSPORTS,
        default="auto",
        help="how tensors cross a boundary between vendors; auto, device-direct and cpu-forward "
        "probe their paths and take the fastest that works",
    )
    group.add_argument(
        "--hetero-nics",
        type=text,
        nargs="+",
        help="network interfaces or RDMA devices, the rails of a link; default: for tcp the "
        "interface towards the first rank, for verbs the devices nearest to the GPU",
    )
    group.add_argument(
        "--hetero-tcp-connections",
        type=integer(1, maximum=ENGINE_RAILS),
        default=4,
        help="tcp connections of a link in each direction",
    )
    group.add_argument(
        "--hetero-ring-mib",
        type=integer(1),
        default=64,
        help="memory of one link's rings, both directions together, in MiB; transport ipc takes "
        "four times as much, half of it in each GPU",
    )
    group.add_argument(
        "--hetero-chunk-kib",
        type=integer(1),
        help="largest chunk of a message in KiB; default: chosen by the path",
    )
    group.add_argument(
        "--hetero-checksum",
        action="store_true",
        help="verify every message end to end, on the CPU",
    )
    group.add_argument(
        "--hetero-timeout",
        type=seconds,
        default=600.0,
        metavar="SECONDS",
        help="seconds until a blocked transfer is an error, and a silent rank counts as ended",
    )


def _add_mesh_flags(group: argparse._ArgumentGroup) -> None:
    for name, words in (
        ("tensor", "tensor-parallel size of each mesh; default: --tensor-model-parallel-size"),
        ("context", "context-parallel size of each mesh; default: --context-parallel-size"),
        ("expert", "expert-parallel size of each mesh; default: --expert-model-parallel-size"),
        ("data", "data-parallel size of each mesh; default: the same for every mesh"),
        (
            "micro-batch",
            "micro-batch size of each mesh, on one data-parallel rank; default: they follow, and "
            "--micro-batch-size is that of the mesh with the most data-parallel ranks",
        ),
    ):
        group.add_argument(f"--hetero-{name}-sizes", nargs="+", type=integer(1), help=words)
    group.add_argument(
        "--hetero-recompute",
        nargs="+",
        choices=RECOMPUTE,
        help="what each mesh recomputes in backward; default: as the --recompute- flags",
    )


def _add_data_parallel_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--hetero-data-parallel",
        type=replicas_by_vendor,
        metavar="VENDOR:REPLICAS,...",
        help="whole replicas of the model on each vendor, in rank order, such as nvidia:2,amd:2",
    )
    group.add_argument(
        "--hetero-data-shares",
        type=lambda text: MEASURED if text == "auto" else list_of(integer(1))(text),
        metavar="N,...|auto",
        help="micro batches of a replica of each vendor in a step; a larger global batch is shared "
        "in the same proportion; auto: for the speeds measured at the start; default: equal",
    )
