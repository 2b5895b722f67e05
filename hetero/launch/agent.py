"""torchelastic's agent over `JobRendezvous`: starts and watches the processes of this node."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from string import Template
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.utils import macros

from hetero.errors import EvictedError, remove_name_files
from hetero.launch.exits import ProcessExit, exit_of
from hetero.launch.fallback import words_with_plan
from hetero.launch.rendezvous import JobRendezvous
from hetero.launch.rounds import Round
from hetero.launch.standby import StandbyPool, become_rank

_LOOK_SECONDS = 0.05
_GRACE_SECONDS = 5.0
"""For processes to end by themselves once another has failed, before they are killed."""


class _RankHandler(SubprocessHandler):
    """A rank, which a standby process becomes if there is one."""

    def __init__(self, standby: StandbyPool | None, **options: Any) -> None:
        self._standby = standby
        super().__init__(**options)

    def _popen(self, args: tuple[str, ...], env_vars: dict[str, str]) -> subprocess.Popen[bytes]:
        if self._standby is not None and args[:2] == (sys.executable, "-u"):
            process = self._standby.take()
            if process is not None and become_rank(
                process,
                args[2:],
                environ=env_vars,
                stdout=self._stdout.name if self._stdout else None,
                stderr=self._stderr.name if self._stderr else None,
            ):
                return process
        return super()._popen(args, env_vars)


class _RankProcesses(SubprocessContext):
    """The ranks of this node in one round."""

    def __init__(self, standby: StandbyPool | None, **options: Any) -> None:
        super().__init__(**options)
        self._standby = standby

    def _start(self) -> None:
        for local_rank in range(self.nprocs):
            self.subprocess_handlers[local_rank] = _RankHandler(
                self._standby,
                entrypoint=self.entrypoint,
                args=self.args[local_rank],
                env=self.envs[local_rank],
                stdout=self.stdouts[local_rank],
                stderr=self.stderrs[local_rank],
                local_rank_id=local_rank,
                numa_options=self._numa_options,
            )


class JobAgent(LocalElasticAgent):
    """Of one node. What differs: nodes restart together, and after as many failures of the job.

    torchelastic counts the failures of each node, and has a node whose processes have ended well
    wait five minutes for the others.
    """

    def __init__(
        self,
        rendezvous: JobRendezvous,
        spec: WorkerSpec,
        *,
        on_joined: Callable[[RendezvousInfo], None],
        restarts_at_once: bool,
        evicts: bool = False,
        standby: StandbyPool | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            on_joined: called in each round, before its processes start.
            restarts_at_once: kill the processes that are left of a failed round, in place of
                asking them to end.
            evicts: raise EvictedError, which ends this launcher, once a rank of its own is found to
                hold what is wrong.
            standby: processes that become ranks.
        """
        super().__init__(spec, **options)
        self._standby = standby
        self._job, self._on_joined = rendezvous, on_joined
        self._restarts_at_once, self._evicts = restarts_at_once, evicts
        self._looked_at = time.monotonic()
        self._ended: dict[int, int] = {}
        """Seconds since the epoch at which each local rank was seen to have ended of itself."""

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        info, spec = self._job.next_rendezvous(), worker_group.spec
        formed = self._job.round
        assert formed is not None
        sizes = [entry.processes for entry in formed.nodes]
        first = sum(sizes[: info.rank])
        worker_group.workers = [
            Worker(
                local_rank=local_rank,
                global_rank=first + local_rank,
                role_rank=first + local_rank,
                world_size=sum(sizes),
                role_world_size=sum(sizes),
            )
            for local_rank in range(spec.local_world_size)
        ]
        assert info.bootstrap_store_info is not None
        group: Any = worker_group  # torchelastic declares its members as None
        self._store = info.store  # type: ignore[assignment]
        group.store = info.store
        group.group_rank, group.group_world_size = info.rank, info.world_size
        group.master_addr = info.bootstrap_store_info.master_addr
        group.master_port = info.bootstrap_store_info.master_port
        self._remaining_restarts = max(0, spec.max_restarts - formed.failures)
        self._on_joined(info)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        formed, spec = self._job.round, worker_group.spec
        assert formed is not None
        environs = {
            worker.local_rank: self._environ(worker, worker_group, formed)
            for worker in worker_group.workers
        }
        own = list(spec.args)
        if formed.plan:
            own = words_with_plan(own, self._written_plan(formed, worker_group.group_rank))
        words = {
            local_rank: tuple(macros.substitute(own, str(local_rank))) for local_rank in environs
        }
        remove_name_files()
        self._setup_local_watchdog(envs=environs)
        self._setup_healthcheck()
        context = _RankProcesses(
            self._standby,
            name=spec.role,
            entrypoint=spec.entrypoint,
            args=words,
            envs=environs,
            logs_specs=self._logs_specs,
            log_line_prefixes=self._log_prefixes(worker_group),
            numa_options=spec.numa_options,
            **_given(spec, "duplicate_stdout_filters", "duplicate_stderr_filters"),
        )
        self._pcontext = context
        self._ended = {}
        context.start()
        self._looked_at = time.monotonic()
        return context.pids()

    def _written_plan(self, formed: Round, node: int | None) -> str:
        """A file with the round's plan, beside the logs: only one node need have the original."""
        file = Path(self._logs_specs.root_log_dir) / f"plan_of_round_{formed.number}_{node}.yaml"
        file.write_text(formed.plan_text, "utf-8")
        return str(file)

    def _environ(self, worker: Worker, group: WorkerGroup, formed: Round) -> dict[str, str]:
        """The variables of one rank, as torchelastic sets them."""
        spec = group.spec
        environ: dict[str, Any] = {
            "RANK": worker.global_rank,
            "GROUP_RANK": group.group_rank,
            "ROLE_RANK": worker.role_rank,
            "ROLE_NAME": spec.role,
            "LOCAL_WORLD_SIZE": spec.local_world_size,
            "WORLD_SIZE": worker.world_size,
            "GROUP_WORLD_SIZE": group.group_world_size,
            "ROLE_WORLD_SIZE": worker.role_world_size,
            "MASTER_ADDR": group.master_addr,
            "MASTER_PORT": group.master_port,
            # Of rounds, as nodes that come or go begin one without a failure: it keeps what
            # processes of different rounds store apart.
            "TORCHELASTIC_RESTART_COUNT": formed.starts,
            "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
            "TORCHELASTIC_RUN_ID": self._job.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get(
                "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"
            ),
        }
        words = {name: str(value) for name, value in environ.items()}
        self._set_local_rank_env(words, worker.local_rank, spec)  # type: ignore[arg-type]
        return words

    def _log_prefixes(self, group: WorkerGroup) -> dict[int, str] | None:
        template = self._log_line_prefix_template
        if not template:
            return None
        return {
            worker.local_rank: Template(template).safe_substitute(
                role_name=group.spec.role, rank=worker.global_rank, local_rank=worker.local_rank
            )
            for worker in group.workers
        }

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._has_failed():
            if self._job.is_for_return():  # another node has left before this one
                return RunResult(state=WorkerState.HEALTHY)
            self._job.notice_loss(time.monotonic() - self._looked_at)
            if self._restarts_at_once and self._remaining_restarts > 0:
                self._end_processes()
        self._looked_at = time.monotonic()
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.SUCCEEDED and not self._job.all_are_done():
            # Others may still fail, and then all start again.
            return RunResult(state=WorkerState.HEALTHY)
        if result.is_failed():
            host = socket.gethostname()
            for failure in result.failures.values():
                # torchelastic takes the time at which it looks, which is once all have ended.
                ended = self._ended.get(failure.local_rank, failure.timestamp)
                failure.timestamp = min(failure.timestamp, ended)
            exits = [exit_of(rank, host, failure) for rank, failure in result.failures.items()]
            self._job.add_exits(exits)
            if self._evicts:
                _require_sound(exits, {worker.global_rank for worker in worker_group.workers})
        return result

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if self._restarts_at_once:
            self._end_processes(0.0 if self._job.is_for_return() else _GRACE_SECONDS)
        super()._stop_workers(worker_group)

    def _exit_barrier(self) -> None:
        """Nothing: all have ended well by then."""

    def _processes(self) -> list[subprocess.Popen[bytes]]:
        context: Any = self._pcontext
        return [] if context is None else [one.proc for one in context.subprocess_handlers.values()]

    def _has_failed(self) -> bool:
        self._running()
        return any(process.returncode for process in self._processes())

    def _running(self) -> list[subprocess.Popen[bytes]]:
        """The processes that have not ended. When one has is noted, as soon as it is seen."""
        running = []
        for local_rank, process in enumerate(self._processes()):
            if process.poll() is None:
                running.append(process)
            else:
                self._ended.setdefault(local_rank, int(time.time()))
        return running

    def _end_processes(self, seconds: float = _GRACE_SECONDS) -> None:
        """Kill what has not ended by itself after a while: an end of its own tells why."""
        deadline = time.monotonic() + seconds
        while (left := self._running()) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        for process in left:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def run_agent(
    options: argparse.Namespace,
    rendezvous: JobRendezvous,
    *,
    on_joined: Callable[[RendezvousInfo], None],
    restarts_at_once: bool,
    evicts: bool = False,
    standby: StandbyPool | None = None,
) -> None:
    """Run the processes that torchrun's `options` describe, until they have ended.

    Raises ChildFailedError if they fail, more often than they may, and EvictedError.
    """
    config, command, arguments = torchrun.config_from_args(options)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = config.signals_to_handle
    values = _given(config, *(one.name for one in fields(WorkerSpec)))
    spec = WorkerSpec(
        **values
        | {
            "local_world_size": config.nproc_per_node,
            "entrypoint": command,
            "args": tuple(arguments),
            "rdzv_handler": rendezvous,
        }
    )
    given = _given(config, "shutdown_timeout")
    agent = JobAgent(
        rendezvous,
        spec,
        on_joined=on_joined,
        restarts_at_once=restarts_at_once,
        evicts=evicts,
        logs_specs=config.logs_specs,
        start_method=config.start_method,
        log_line_prefix_template=config.log_line_prefix_template,
        standby=standby,
        **{name: value for name, value in given.items() if value is not None},
    )
    result = agent.run()
    if result is not None and result.is_failed():
        raise ChildFailedError(name=str(command), failures=result.failures)


def _require_sound(exits: Sequence[ProcessExit], own: set[int]) -> None:
    found = next((one for one in exits if own & set(one.corrupt)), None)
    if found is not None:
        raise EvictedError(
            f"the node {socket.gethostname()} leaves the job (--hetero-evict): {found.sentence()}"
        )


def _given(options: Any, *names: str) -> dict[str, Any]:
    """Those that this release of PyTorch has."""
    return {name: getattr(options, name) for name in names if hasattr(options, name)}
