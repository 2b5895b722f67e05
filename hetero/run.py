"""Start a program on the processes of this node, as torchrun does, with its flags.

    python -m hetero.run --nproc-per-node 8 pretrain_gpt.py --num-layers 32 ...

Unlike torchrun it prints which nodes it waits for, ends with one sentence that names the cause with
its rank and host, and returns that rank's exit code: 2 for bad input, 1 for a failure, 128 plus the
number of a signal, so 130 after Ctrl-C.

A script that makes groups with backend="nccl" gets groups that also cross vendors. Another launcher
does the same if it starts this module in place of the script:

    torchrun --nproc-per-node 8 -m hetero.run train.py ...
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import logging
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from hetero.errors import Faults, UserError, print_error, print_line
from hetero.launch.exec_script import end_at_once_by_signals, exec_script_if_rank
from hetero.text import counted
from hetero.version import exit_unless_installed

if __name__ == "__main__":
    exec_script_if_rank()
    # PyTorch reads it when imported. Otherwise it logs a stack trace when a store's host ends.
    _QUIETED_CPP_LOG = "TORCH_CPP_LOG_LEVEL" not in os.environ
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    # Importing torch takes seconds. Until then a signal has nothing to clean up.
    end_at_once_by_signals()
    exit_unless_installed("torch", "psutil")
    if not {"-h", "--help"} & set(sys.argv[1:2]):
        asked = re.search(r"--nproc[-_]per[-_]node[= ](\d+)", " ".join(sys.argv[1:]))
        ranks = counted(int(asked[1]), "rank") if asked else "the ranks"
        print_line(f"hetero.run: starting {ranks} on {socket.gethostname()}, importing PyTorch ...")

import psutil
from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)

from hetero.collectives.backend import replace_nccl
from hetero.launch.exits import exit_of, find_cause, is_printed, kills_for_memory
from hetero.launch.launcher_rendezvous import BACKEND, LauncherRendezvous, RendezvousSettings
from hetero.launch.node_failures import NodeFailures
from hetero.launch.signal_forwarder import SignalForwarder, kill_all
from hetero.startup.addresses import address_leading_to
from hetero.startup.process import LAUNCHER_VARIABLE, allow_open_files, unknown_variables

T = TypeVar("T")

_RENDEZVOUS_SECONDS = 600.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher; return its exit code. Once a process: torchelastic's registry is global."""
    replace_nccl()
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    try:
        options = _parse(argv)
        allow_open_files()
        _quiet_torch()
        with _own_log_folder(options):
            settings = _checked(options)
            for sentence in unknown_variables(os.environ):
                print_line(f"hetero.run: warning: {sentence}")
            with SignalForwarder(options) as forwarder:
                return _Launcher(settings, forwarder).run(options)
    except UserError as error:
        print_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return _interrupted(signal.SIGINT)
    except SignalException as stopped:  # a second one, after the first has been handled
        return 128 + stopped.sigval


class _Launcher:
    """One run of torchelastic's agent, and the line that explains its end."""

    def __init__(self, settings: RendezvousSettings, forwarder: SignalForwarder) -> None:
        self._settings, self._forwarder = settings, forwarder
        self._node_failures: NodeFailures | None = None
        self._starts = 0
        """How often this node's processes were to start: once, and after each end or new node."""
        self._memory_kills = kills_for_memory()

    def run(self, options: argparse.Namespace) -> int:
        rendezvous_handler_registry.register(BACKEND, self._rendezvous)
        try:
            return self._run_agent(options)
        except Exception as error:
            if (number := _signal_behind(error)) is None:
                raise
            return self._stopped(number)
        finally:
            try:
                if self._node_failures is not None:
                    self._node_failures.leave()
            finally:
                _end_children()

    def _run_agent(self, options: argparse.Namespace) -> int:
        try:
            torchrun.run(options)
        except ChildFailedError as failed:
            return self._explain(failed)
        except (RendezvousError, DistError) as error:
            raise UserError(
                f"the launchers lost their rendezvous at {self._settings.endpoint} "
                f"({str(error).splitlines()[0]}); see what the launcher of node 0 says"
            ) from error
        if self._node_failures is not None and self._node_failures.remote_cause is not None:
            return self._stopped(signal.SIGTERM)
        return 0

    def _rendezvous(self, parameters: RendezvousParameters) -> Any:
        return LauncherRendezvous(
            self._settings,
            parameters,
            self._on_joined,
            check_abort=self._forwarder.raise_first,
        )

    def _on_joined(self, info: RendezvousInfo) -> None:
        self._starts += 1
        if self._starts > 1:
            print_line(
                f"hetero.run: the processes of {socket.gethostname()} start again (start "
                f"{self._starts}), because one of the job has ended or a node has come or gone"
            )
        if info.world_size > 1 and self._node_failures is None:
            self._node_failures = NodeFailures(info)
            self._node_failures.watch(lambda: os.kill(os.getpid(), signal.SIGTERM))

    def _explain(self, failed: ChildFailedError) -> int:
        host = socket.gethostname()
        exits = [exit_of(rank, host, failure) for rank, failure in failed.failures.items()]
        cause = find_cause(exits)
        if self._forwarder.first is not None and not (cause.is_cause and cause.text):
            return self._stopped(self._forwarder.first)
        if self._node_failures is not None:
            cause = self._node_failures.exchange(cause)
        if not is_printed(cause, exits):
            out_of_memory = kills_for_memory() > self._memory_kills and cause.host == host
            print_error(cause.sentence(out_of_memory=out_of_memory))
        return cause.exit_code

    def _stopped(self, number: signal.Signals) -> int:
        if (
            self._node_failures is not None
            and (cause := self._node_failures.remote_cause) is not None
        ):
            print_error(cause.sentence())
            return cause.exit_code
        return _interrupted(number)


def _signal_behind(error: BaseException | None) -> signal.Signals | None:
    """The signal that ended torchelastic, also if its SignalException caused another exception."""
    while error is not None:
        if isinstance(error, SignalException):
            return signal.Signals(error.sigval)
        error = error.__context__
    return None


def _interrupted(number: signal.Signals) -> int:
    what = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    print_error(f"{what}; so are the processes of {socket.gethostname()}")
    return 128 + number


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = torchrun.get_args_parser()
    # torchrun's own defaults would have the nodes of a job meet at this host, all as node 0.
    for name, flag in (("master_addr", "MASTER_ADDR"), ("node_rank", "NODE_RANK")):
        if f"PET_{flag}" not in os.environ:
            parser.set_defaults(**{name: None})
    parser.prog, parser.description = "python -m hetero.run", (__doc__ or "").partition("\n")[0]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parser.parse_args(argv)
    except SystemExit as stop:
        if not stop.code:
            raise
        reason = said.getvalue().strip().rpartition("error: ")[2]
        raise UserError(f"{reason}; --help lists the flags, which are torchrun's") from None


def _checked(options: argparse.Namespace) -> RendezvousSettings:
    """The rendezvous of the command line. Raises UserError with all that is wrong with it."""
    faults = Faults()
    settings = _rendezvous_settings(options, faults)
    faults.sentences += [*_program_problems(options), *_host_name_problems(socket.gethostname())]
    if settings is not None:
        if not faults.sentences:
            _set_threads(settings.processes)
        _by_torchrun(faults, "", lambda: torchrun.config_from_args(options))
    faults.refuse()
    assert settings is not None
    return settings


def _rendezvous_settings(options: argparse.Namespace, faults: Faults) -> RendezvousSettings | None:
    """The rendezvous of the command line; replaces it by `LauncherRendezvous` in `options`.

    None where one of its flags cannot be read.
    """
    nodes = _by_torchrun(
        faults,
        f"--nnodes {options.nnodes}: ",
        lambda: torchrun.parse_min_max_nnodes(options.nnodes)[1],
    )
    processes = _by_torchrun(
        faults,
        f"--nproc-per-node {options.nproc_per_node}: ",
        lambda: torchrun.determine_local_world_size(options.nproc_per_node),
    )
    timeout = _by_torchrun(
        faults,
        f"--rdzv-conf {options.rdzv_conf}: ",
        lambda: _rendezvous_seconds(options.rdzv_conf),
    )
    if processes is not None and processes < 1:
        faults.sentences.append(f"--nproc-per-node is {processes}; give 1 or more")
    if nodes is None or processes is None or timeout is None:
        return None
    if options.standalone and nodes > 1:
        faults.sentences.append(
            f"--standalone is for one node and --nnodes is {options.nnodes}; remove one of them"
        )
    alone = nodes == 1 and not options.rdzv_endpoint and options.master_port is None
    backend = options.rdzv_backend
    if nodes > 1 and not options.standalone and not options.rdzv_endpoint:
        faults.add(_meeting_problems(options, nodes))
    is_numbered = options.node_rank is not None
    if options.master_addr is None:
        options.master_addr = "127.0.0.1"
    options.node_rank = options.node_rank or 0
    if options.standalone or (backend == "static" and alone):
        backend, endpoint, options.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
    else:
        endpoint = options.rdzv_endpoint or f"{options.master_addr}:{options.master_port or 29500}"
    if backend == "static" and not 0 <= options.node_rank < nodes:
        faults.sentences.append(
            f"--node-rank is {options.node_rank} and the job has {counted(nodes, 'node')}; give 0"
            + (f" to {nodes - 1}" if nodes > 1 else "")
        )
    if backend == "c10d" and ":" not in endpoint:
        endpoint += ":29400"  # as torchrun does
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal():
        lacks = "port" if host else "host"
        faults.sentences.append(
            f"the rendezvous endpoint {endpoint!r} has no {lacks}; give HOST:PORT"
        )
    if host.strip("[").lower().startswith("fe80:"):
        faults.sentences.append(
            f"{host} is a link-local address, by which gloo and links cannot meet; give the hosts "
            "others (ip address add fd00::1/64 dev INTERFACE, and fd00::2 on the next)"
        )
    if options.local_addr is None:
        # Where rank 0's store is reached. torchelastic gives this host's name, which may lead
        # nowhere.
        own = "127.0.0.1" if nodes == 1 else address_leading_to(host.strip("[]"))
        options.local_addr = own
    options.standalone, options.rdzv_backend, options.rdzv_endpoint = False, BACKEND, endpoint
    return RendezvousSettings(
        backend=backend,
        endpoint=endpoint,
        nodes=nodes,
        node_rank=options.node_rank,
        processes=processes,
        timeout=timeout,
        is_numbered=is_numbered,
        common={
            "--nnodes": str(options.nnodes),
            "--rdzv-id": str(options.rdzv_id),
            "--max-restarts": str(options.max_restarts),
        },
    )


def _meeting_problems(options: argparse.Namespace, nodes: int) -> Iterator[str]:
    """What the nodes of a job need to meet, and would else look for on this host for minutes."""
    if options.master_addr is not None:
        return
    if options.rdzv_backend != "static":
        yield (
            f"--nnodes is {options.nnodes} and --rdzv-endpoint is missing; give the address of one "
            "node and a port, the same on every node"
        )
        return
    numbers = "" if options.node_rank is not None else f", and --node-rank 0 to {nodes - 1}"
    yield (
        f"--nnodes is {options.nnodes} and --master-addr is missing; give the address of node 0 on "
        f"every node{numbers}"
    )


def _rendezvous_seconds(configuration: str) -> float:
    pairs = [part.partition("=") for part in configuration.split(",")]
    configured = {key.strip(): value for key, _, value in pairs}
    return float(configured.get("join_timeout") or configured.get("timeout") or _RENDEZVOUS_SECONDS)


def _set_threads(processes: int) -> None:
    """Give each of several ranks one thread of OpenMP, as torchrun does, and say so."""
    if processes > 1 and "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
        print_line(
            "hetero.run: OMP_NUM_THREADS is not set; every rank has 1 thread on the CPU, as with "
            "torchrun: set it where the CPU computes and there are more cores than ranks"
        )


def _program_problems(options: argparse.Namespace) -> Iterator[str]:
    """Why a program cannot start, which would fail on every rank with a traceback."""
    program = options.training_script
    if options.no_python:
        if shutil.which(program) is None:
            yield f"there is no program {program}; give a path, or a name on PATH"
    elif options.module:
        if importlib.util.find_spec(program.partition(".")[0]) is None:
            yield f"there is no module {program}; see the folder and PYTHONPATH"
    elif not Path(program).exists():
        yield f"there is no file {program}; the script comes after the launcher's flags"
    elif Path(program).is_dir() and not Path(program, "__main__.py").exists():
        yield f"{program} is a folder without __main__.py; name the script"


def _host_name_problems(name: str) -> Iterator[str]:
    """Why PyTorch's launcher could not look up this host's name, which Linux allows to be odd."""
    try:
        name.encode("idna")
    except UnicodeError as error:
        yield (
            f"the host is called {name!r}, which is no host name ({error}): 63 bytes at most "
            "between two dots; give it another (hostname NAME)"
        )


def _by_torchrun(faults: Faults, flag: str, read: Callable[[], T]) -> T | None:
    """What a function of torchrun's makes of a flag; None, and a sentence, where it refuses it."""
    try:
        return read()
    except (OSError, ValueError, RuntimeError, AssertionError) as error:
        reason = str(error).strip().rstrip(".")
        faults.sentences.append(f"{flag}{reason}; --help lists the flags, which are torchrun's")
        return None


def _quiet_torch() -> None:
    """Silence torchelastic's log of every failure, unless the user has set LOGLEVEL."""
    if "LOGLEVEL" not in os.environ:
        for name in logging.root.manager.loggerDict:
            if name.startswith(("torch.distributed.elastic", "torch.distributed.run")):
                logging.getLogger(name).setLevel(logging.CRITICAL + 1)


@contextmanager
def _own_log_folder(options: argparse.Namespace) -> Iterator[None]:
    """A temporary folder for error files; torchrun would leave one behind for each run."""
    if options.log_dir is not None:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="hetero-run-") as folder:
        options.log_dir = folder
        yield


def _end_children() -> None:
    """Kill the remaining processes of this node, as after a second Ctrl-C."""
    kill_all(psutil.Process().children(recursive=True))


if __name__ == "__main__":
    if _QUIETED_CPP_LOG:  # Child processes log as usual.
        del os.environ["TORCH_CPP_LOG_LEVEL"]
    sys.exit(main())
