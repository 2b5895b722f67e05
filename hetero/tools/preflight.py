"""Check a node, or all nodes of a job together, before training: what is there and what is amiss.

    hetero preflight                                             # this node alone
    hetero preflight --nnodes 2 --node-rank $N --nproc-per-node 1 \\
        --master-addr $HOST --master-port 29500                  # all nodes together

One process a node is enough. Exit code 0: a job can start; 1: it would fail, see the problems;
2: the check itself could not be made.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # As a script, only this file's folder would be importable.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from hetero import cli

    sys.exit(cli.main(["preflight", *sys.argv[1:]]))

from torch.distributed import DistError

from hetero.errors import ExchangeError, HeteroError, print_error, write_error_file
from hetero.startup.exchange import JobExchanges
from hetero.startup.liveness import LocalRanks, open_liveness
from hetero.tools import tool_command_line
from hetero.tools.preflight_checks.job import ClusterCheck, Settings, check_alone
from hetero.tools.preflight_checks.report import Report, cluster_text
from hetero.tools.reports.page import write_whole
from megatron.hetero.rendezvous import environment_rank, open_store, store_endpoint

_PATIENCE = 300.0
"""Seconds for all ranks to have come, and for the slowest pair to have measured."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    problems: list[bool] = []

    def work() -> str:
        rank, world_size, _ = environment_rank()
        if rank > 0:  # Rank 0 speaks for all, and prints what all of them know.
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        try:
            report = _check(options, rank, world_size)
        except HeteroError as error:
            if rank > 0 and error.known_to_all:
                write_error_file(str(error), printed=False, known_to_all=True)
                sys.exit(error.exit_code)
            raise
        problems.append(report.has_problem)
        if report.has_problem:  # Rank 0 prints it as the last line; a launcher adds none.
            write_error_file(report.verdict, printed=rank == 0, known_to_all=True)
        return report.verdict

    code = tool_command_line.run(work)
    return code or int(any(problems))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = tool_command_line.Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--hetero-nics",
        nargs="+",
        default=[],
        metavar="NIC",
        help="NICs to try between nodes, as training would be given; default: those recommended",
    )
    parser.add_argument(
        "--no-bandwidth", action="store_true", help="measure no links and no copies"
    )
    parser.add_argument(
        "--brief", action="store_true", help="print the advice and the verdict alone"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there too")
    parser.add_argument(
        "--write-cluster",
        type=Path,
        metavar="FILE",
        help="write the nodes and the links between them there, for `hetero plan`",
    )
    parser.add_argument(
        "--emulate-nodes",
        action="store_true",
        help="count every process as a node, to see on one machine what is checked between nodes",
    )
    return parser.parse_args(argv)


def _check(options: argparse.Namespace, rank: int, world_size: int) -> Report:
    """Make the report, print all but its last line, and write it where that was asked for."""
    settings = Settings(
        nics=tuple(options.hetero_nics),
        bandwidth=not options.no_bandwidth,
        each_rank_a_node=options.emulate_nodes,
    )
    for flag, path in (("--json", options.json), ("--write-cluster", options.write_cluster)):
        if path is not None and rank == 0:  # which writes it
            tool_command_line.require_results_file(path, flag)
    if world_size == 1:
        report = check_alone(settings)
        _tell(report, options)
        return report
    local_ranks = LocalRanks()
    store = open_store(rank, world_size, _PATIENCE, local_ranks)
    liveness = open_liveness(
        store,
        rank=rank,
        world_size=world_size,
        master=os.environ["MASTER_ADDR"],
        local_ranks=local_ranks,
    )
    ending = threading.Event()
    liveness.on_failure(lambda error: None if ending.is_set() else _end(error))
    exchanges = JobExchanges(
        store,
        rank=rank,
        world_size=world_size,
        timeout=_PATIENCE,
        liveness=liveness,
        endpoint=store_endpoint(),
    )
    try:
        report = ClusterCheck(settings, rank=rank, store=store, exchanges=exchanges).check()
        if rank == 0:
            _tell(report, options)
    except (KeyboardInterrupt, SystemExit):
        # The others may be ended in the same moment, and would not leave.
        liveness.fail("it was interrupted")
        raise
    except Exception as error:
        ending.set()
        if isinstance(error, DistError) and (cause := liveness.cause()) is not None:
            raise ExchangeError(cause, known_to_all=False) from error
        if not isinstance(error, HeteroError):
            liveness.fail(str(error) or type(error).__name__)
        # Who hangs does not leave; who waits in a link hears of this end within 5 s.
        liveness.leave(seconds=6.0 if isinstance(error, ExchangeError) else 10.0)
        raise
    ending.set()
    liveness.leave(seconds=10.0)
    return report


def _end(error: ExchangeError) -> None:
    """Another rank has ended, and the main thread waits where nothing tells it, as in a link."""
    print_error(str(error))
    write_error_file(str(error), printed=True)
    os._exit(error.exit_code)


def _tell(report: Report, options: argparse.Namespace) -> None:
    if options.json is not None:
        write_whole(options.json, json.dumps(report.as_dict(), indent=1) + "\n")
    if options.write_cluster is not None:
        write_whole(options.write_cluster, cluster_text(report))
    for line in report.lines(brief=options.brief):
        print(line)
