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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

from hetero.errors import (
    NAMES_VARIABLE,
    EvictedError,
    Faults,
    UserError,
    print_error,
    print_line,
)
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
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousInfo

from hetero.collectives.backend import replace_nccl
from hetero.launch.agent import run_agent
from hetero.launch.exits import exit_of, find_cause, is_printed, kills_for_memory
from hetero.launch.fallback import AUTO, AUTO_FLAG, Fallback
from hetero.launch.job_state import JobState
from hetero.launch.job_store import RendezvousSettings
from hetero.launch.node_failures import NodeFailures
from hetero.launch.node_memory import NodeMemory
from hetero.launch.plan_search import Planner
from hetero.launch.rendezvous import JobRendezvous
from hetero.launch.signal_forwarder import SignalForwarder, kill_all
from hetero.launch.standby import StandbyPool
from hetero.observe.flight_recorder import set_buffer_size
from hetero.observe.options import (
    ADDRESS_VARIABLE,
    PORT_VARIABLE,
    STALL_VARIABLE,
    requested_endpoint,
    stall_warning_seconds,
)
from hetero.plan import VENDOR_VARIABLE, VENDORS
from hetero.recover.history import JobHistory
from hetero.startup.addresses import address_leading_to
from hetero.startup.identity import built_vendor
from hetero.startup.process import LAUNCHER_VARIABLE, allow_open_files, unknown_variables

T = TypeVar("T")

_RENDEZVOUS_SECONDS = 600.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher; return its exit code. Once a process: torchelastic's registry is global."""
    replace_nccl()
    set_buffer_size()
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    try:
        options = _parse(argv)
        allow_open_files()
        _quiet_torch()
        with _own_log_folder(options), _names_folder():
            settings = _checked(options)
            for sentence in unknown_variables(os.environ):
                print_line(f"hetero.run: warning: {sentence}")
            with SignalForwarder(options) as forwarder:
                return _Launcher(settings, forwarder).run(options)
    except (UserError, EvictedError) as error:
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
        can_restart = settings.restarts_at_once and settings.restarts > 0
        self._state = JobState(settings.host_and_port[0]) if can_restart else None
        self._standby: StandbyPool | None = None
        """With --hetero-restarts. Its first processes import while the nodes meet."""
        if can_restart and settings.script:
            self._standby = StandbyPool(settings.processes, settings.script)
            forwarder.leave_out(self._standby.pids)
        self._job: JobRendezvous | None = None
        """None with a rendezvous of torchelastic's, or another package's, own."""
        if settings.backend in ("static", "c10d"):
            self._job = JobRendezvous(
                settings,
                vendor=_node_vendor(),
                check_abort=forwarder.raise_first,
                state=dict if self._state is None else self._state.entry,
                memory=self._memory,
                is_ready=lambda: self._standby is None or self._standby.is_ready(),
                newest_state=lambda: None if self._state is None else self._state.newest(),
            )
        self._memory_kills = kills_for_memory()

    @cached_property
    def _node_memory(self) -> NodeMemory:
        return NodeMemory.read(self._settings.processes)

    def _memory(self) -> NodeMemory:
        return self._node_memory if self._settings.planner is not None else NodeMemory()

    def run(self, options: argparse.Namespace) -> int:
        try:
            code = self._run_agent(options)
            with suppress(SignalException):  # this node's processes have ended
                self._end_job(f"the job has ended with exit code {code}")
            return code
        except Exception as error:
            if (number := _signal_behind(error)) is None:
                raise
            return self._stopped(number)
        finally:
            with ExitStack() as stack:
                stack.callback(_end_children)
                for part in (self._job, self._state, self._standby):
                    if part is not None:
                        stack.callback(part.close)
                if self._node_failures is not None:
                    with suppress(SignalException):
                        self._node_failures.leave()

    def _end_job(self, text: str) -> None:
        if self._job is not None and self._job.round is not None:
            self._job.tell_over(text)

    def _run_agent(self, options: argparse.Namespace) -> int:
        try:
            if self._job is None:
                torchrun.run(options)
            else:
                run_agent(
                    options,
                    self._job,
                    on_joined=self._on_joined,
                    restarts_at_once=self._settings.restarts_at_once,
                    evicts=options.hetero_evict,
                    standby=self._standby,
                )
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

    def _on_joined(self, info: RendezvousInfo) -> None:
        assert self._job is not None
        formed, settings = self._job.round, self._settings
        assert formed is not None
        if formed.reason:
            spent = f" ({formed.failures} of {settings.restarts})" if settings.restarts else ""
            plan = f"; the plan is now {formed.plan}" if formed.plan else ""
            print_line(
                f"hetero.run: the processes of {socket.gethostname()} start again{spent}: "
                f"{formed.reason}{plan}"
            )
            *_, incident = JobHistory.from_record(formed.history).incidents
            print_line(f"hetero.run: since the loss: {incident.parts()}")
        if self._state is not None:
            self._state.begin_round(formed, self._job.node)
        if self._node_failures is not None:
            self._node_failures.stop()
        self._node_failures = None
        if info.world_size > 1:
            with suppress(DistError):  # the store is lost, which the agent notices
                self._node_failures = NodeFailures(info, has_lost_node=self._job.has_lost_node)
            is_last = formed.failures >= settings.restarts  # else they meet again
            if is_last and self._node_failures is not None:
                self._node_failures.watch(lambda: os.kill(os.getpid(), signal.SIGTERM))

    def _explain(self, failed: ChildFailedError) -> int:
        host = socket.gethostname()
        exits = [exit_of(rank, host, failure) for rank, failure in failed.failures.items()]
        cause = find_cause(exits)
        if self._forwarder.first is not None and not (cause.is_cause and cause.text):
            return self._stopped(self._forwarder.first)
        if self._node_failures is not None:
            with suppress(SignalException):  # the processes have ended; no other report comes
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


def _node_vendor() -> str:
    """What HETERO_VENDOR says, or the vendor that this PyTorch is built for."""
    return os.environ.get(VENDOR_VARIABLE, "").strip().lower() or built_vendor()


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
    if "PET_SIGNALS_TO_HANDLE" not in os.environ:
        # Not SIGQUIT, which shows the stacks of the ranks.
        parser.set_defaults(signals_to_handle="SIGTERM,SIGINT,SIGHUP")
    parser.prog, parser.description = "python -m hetero.run", (__doc__ or "").partition("\n")[0]
    view = parser.add_argument_group("what rank 0 shows and says of the job")
    view.add_argument(
        "--metrics-port",
        metavar="PORT",
        help="port of rank 0's host that shows the job while it runs: a page, /state for `hetero "
        f"top` and /metrics for Prometheus; 0: any free one, which is printed ({PORT_VARIABLE})",
    )
    view.add_argument(
        "--metrics-address",
        metavar="ADDRESS",
        help="address of rank 0's host to show it on, 0.0.0.0 for all; default: 127.0.0.1, which "
        f"only programs of that host reach ({ADDRESS_VARIABLE})",
    )
    view.add_argument(
        "--stall-warning",
        metavar="SECONDS",
        help="seconds without progress after which a warning says who holds the job up; 0: never; "
        f"default: 60 ({STALL_VARIABLE})",
    )
    survival = parser.add_argument_group("what survives a loss")
    survival.add_argument(
        "--hetero-restarts",
        type=int,
        metavar="N",
        help="after the loss of a rank or a node, kill the other processes and start all again, up "
        "to N times; training goes on from its newest state, in memory or in --save; with --nnodes "
        "MIN:MAX nodes beyond MIN wait as spares; default: 0",
    )
    survival.add_argument(
        "--hetero-fallback",
        action="append",
        metavar="FILE",
        help="plan for the nodes that are left when a vendor is lost, in place of the layout on "
        "the command line; auto: the planner chooses it; may be given several times, the best "
        "first, auto counts as the last; needs --hetero-restarts",
    )
    survival.add_argument(
        "--hetero-return-interval",
        type=float,
        default=0.0,
        metavar="MINUTES",
        help="under a fallback plan, before the job's own plan runs again once the lost nodes are "
        "back; default: 0",
    )
    survival.add_argument(
        "--no-hetero-return",
        action="store_true",
        help="stay with a fallback plan when lost nodes are back",
    )
    survival.add_argument(
        "--hetero-evict",
        action="store_true",
        help="end this node's launcher, with exit code 3, once weights of one of its ranks are "
        "found to differ from most other copies "
        "(--check-weight-hash-across-dp-replicas-interval): a spare takes its place, or a fallback "
        "plan runs; needs --hetero-restarts and several nodes",
    )
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
    for name, value in (
        (PORT_VARIABLE, options.metrics_port),
        (ADDRESS_VARIABLE, options.metrics_address),
        (STALL_VARIABLE, options.stall_warning),
    ):
        if value is not None:
            os.environ[name] = value
    faults.read(lambda: requested_endpoint(os.environ))
    faults.read(lambda: stall_warning_seconds(os.environ))
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
    both = _by_torchrun(
        faults,
        f"--nnodes {options.nnodes}: ",
        lambda: torchrun.parse_min_max_nnodes(options.nnodes),
    )
    processes = _by_torchrun(
        faults,
        f"--nproc-per-node {options.nproc_per_node}: ",
        lambda: torchrun.determine_local_world_size(options.nproc_per_node),
    )
    conf = _by_torchrun(
        faults,
        f"--rdzv-conf {options.rdzv_conf}: ",
        lambda: _RendezvousConf.parse(options.rdzv_conf),
    )
    if processes is not None and processes < 1:
        faults.sentences.append(f"--nproc-per-node is {processes}; give 1 or more")
    if both is None or processes is None or conf is None:
        return None
    least, nodes = both
    max_restarts, restarts = options.max_restarts, _restarts(options, faults)
    if options.hetero_evict and not (options.hetero_restarts and nodes > 1):
        faults.sentences.append(
            "--hetero-evict needs --hetero-restarts of 1 or more and --nnodes of more than one "
            "node: the others go on"
        )
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
    if backend == "static" and least < nodes and not options.hetero_restarts:
        faults.sentences.append(
            f"--nnodes is {options.nnodes}, and numbered nodes all take part: give one number, or "
            "--hetero-restarts for nodes that wait until one is lost, or --rdzv-backend c10d"
        )
    options.standalone, options.rdzv_endpoint = False, endpoint
    options.rdzv_backend = "c10d" if conf.is_of_a_file and backend == "c10d" else backend
    return RendezvousSettings(
        backend="file" if conf.is_of_a_file and backend == "c10d" else backend,
        endpoint=endpoint,
        nodes=nodes,
        least_nodes=least,
        node_rank=options.node_rank,
        processes=processes,
        timeout=conf.timeout,
        last_call=conf.last_call,
        is_host=conf.is_host,
        restarts=restarts,
        restarts_at_once=options.hetero_restarts is not None,
        script="" if options.no_python else options.training_script,
        has_spares=options.hetero_restarts is not None and least < nodes,
        job=str(options.rdzv_id),
        fallbacks=_fallbacks(options, faults),
        planner=_planner(options, faults),
        return_seconds=None if options.no_hetero_return else 60 * options.hetero_return_interval,
        address=options.local_addr,
        is_numbered=is_numbered,
        common={
            "--nnodes": str(options.nnodes),
            "--rdzv-id": str(options.rdzv_id),
            "--max-restarts": str(max_restarts),
            "--hetero-restarts": str(options.hetero_restarts or 0),
            "--hetero-fallback": " ".join(options.hetero_fallback or []),
        },
    )


def _restarts(options: argparse.Namespace, faults: Faults) -> int:
    """How often the processes start again, and give torchelastic's agent that number."""
    if options.hetero_restarts is None:
        return int(options.max_restarts)
    if options.hetero_restarts < 0:
        faults.sentences.append(f"--hetero-restarts is {options.hetero_restarts}; give 0 or more")
    if options.max_restarts:
        faults.sentences.append(
            "--max-restarts and --hetero-restarts are both given; give one of them"
        )
    options.max_restarts = options.hetero_restarts
    return int(options.hetero_restarts)


def _fallbacks(options: argparse.Namespace, faults: Faults) -> tuple[Fallback, ...]:
    """The plan files, and what is wrong with them."""
    given = options.hetero_fallback or []
    if given and not options.hetero_restarts:
        faults.sentences.append("--hetero-fallback needs --hetero-restarts of 1 or more")
    if given and (vendor := _node_vendor()) not in VENDORS:
        faults.sentences.append(
            f"--hetero-fallback needs nodes of one vendor each, and {VENDOR_VARIABLE} is "
            f"{vendor!r}; give one of {', '.join(VENDORS)}"
        )
    files = dict.fromkeys(file for file in given if file != AUTO)
    read = [fallback for file in files if (fallback := faults.read(partial(Fallback.read, file)))]
    if read and (words := _training_words(options)) is not None:
        # Only here: other launchers need no flags of training.
        from hetero.launch.fallback_planner import check_words

        for fallback in read:
            ranks = sum(count for _, count in fallback.meshes)
            said = check_words(words, fallback.text, ranks=ranks)
            faults.sentences += [f"--hetero-fallback {fallback.file}: {one}" for one in said]
    return tuple(read)


def _planner(options: argparse.Namespace, faults: Faults) -> Planner | None:
    """What --hetero-fallback auto asks for."""
    if AUTO not in (options.hetero_fallback or []):
        return None
    words = _training_words(options)
    if words is None:
        faults.sentences.append(
            f"{AUTO_FLAG} plans for pretrain_gpt.py, and the script is {options.training_script}; "
            "give a plan file"
        )
        return None
    # Only here: other launchers need neither the planner nor flags of training.
    from hetero.launch.fallback_planner import FallbackPlanner

    return faults.read(lambda: FallbackPlanner(words))


def _training_words(options: argparse.Namespace) -> list[str] | None:
    """The flags of pretrain_gpt.py; None of another program."""
    script, words = options.training_script, list(options.training_script_args)
    if options.module:
        return words[1:] if script == "hetero" and words[:1] == ["pretrain"] else None
    return words if Path(script).name == "pretrain_gpt.py" and not options.no_python else None


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


@dataclass(frozen=True)
class _RendezvousConf:
    """What --rdzv-conf says, by torchelastic's names."""

    timeout: float = _RENDEZVOUS_SECONDS
    last_call: float = 30.0
    is_host: bool | None = None
    is_of_a_file: bool = False

    @classmethod
    def parse(cls, text: str) -> _RendezvousConf:
        pairs = [part.partition("=") for part in text.split(",")]
        given = {key.strip(): value.strip() for key, _, value in pairs}
        is_host = given.get("is_host")
        return cls(
            timeout=float(given.get("join_timeout") or given.get("timeout") or cls.timeout),
            last_call=float(given.get("last_call_timeout") or cls.last_call),
            is_host=None if is_host is None else is_host.lower() in ("1", "true", "t", "yes", "y"),
            is_of_a_file=given.get("store_type") == "file",
        )


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


@contextlib.contextmanager
def _names_folder() -> Iterator[None]:
    """A folder in which ranks say how the run names them."""
    with tempfile.TemporaryDirectory(prefix="hetero-names-", ignore_cleanup_errors=True) as folder:
        os.environ[NAMES_VARIABLE] = folder
        yield


def _end_children() -> None:
    """Kill the remaining processes of this node, as after a second Ctrl-C."""
    kill_all(psutil.Process().children(recursive=True))


if __name__ == "__main__":
    if _QUIETED_CPP_LOG:  # Child processes log as usual.
        del os.environ["TORCH_CPP_LOG_LEVEL"]
    sys.exit(main())
