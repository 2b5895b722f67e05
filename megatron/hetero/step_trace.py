"""--hetero-trace: records a few steps on all ranks, and writes them as one file for Perfetto."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hetero.observe.clocks import (
    PINGS,
    SHARED,
    Alignment,
    Offset,
    Ping,
    clock_identity,
    offset_of,
)
from hetero.observe.record import recorder
from hetero.observe.trace import (
    FILE,
    MOST_SPANS,
    RankTrace,
    SpanRecorder,
    chrome_trace,
    clock_sentence,
    write_trace,
)
from hetero.text import counted, spans
from hetero.version import __version__
from megatron.hetero.console import Console
from megatron.hetero.job import Job
from megatron.hetero.schedule import Schedule
from megatron.hetero.timers import StreamClock


class StepTrace:
    """The traced steps of one rank's run; does nothing without --hetero-trace.

    `before_step`, `after_step` and `close` are collective in the steps in which they have something
    to do, which are the same on all ranks. Nothing is sent in a traced step, and no GPU is waited
    for.
    """

    def __init__(self, job: Job, schedule: Schedule, console: Console) -> None:
        self._job, self._schedule, self._console = job, schedule, console
        self._folder = job.args.hetero_trace
        steps: tuple[int, int] = job.args.hetero_trace_steps or (0, 0)
        self._first, self._last = steps
        self._is_due = self._folder is not None
        self._recorded: SpanRecorder | None = None
        self._clocks: Clocks | None = None

    def before_step(self, iteration: int) -> None:
        """Begin to record if `iteration`, the next one, is among those to trace."""
        if not self._is_due or not self._first <= iteration <= self._last:
            return
        self._is_due = False
        self._clocks = Clocks()
        self._clocks.measure()
        marks = StreamClock() if self._job.device.type == "cuda" else None
        self._recorded = SpanRecorder(recorder(), marks=marks)
        self._recorded.begin(*self._schedule.neighbours())

    def begin_step(self) -> None:
        """The step begins, before its first phase."""
        if self._recorded is not None:
            self._recorded.begin_step()

    def end_step(self, *, iteration: int, seconds: float) -> None:
        """It has ended, and took so long."""
        if self._recorded is not None:
            self._recorded.end_step(iteration=iteration, seconds=seconds)

    def after_step(self, iteration: int) -> None:
        """`iteration` and what followed it are done: write the file if it was the last one."""
        if self._recorded is not None and iteration >= self._last:
            self._write(self._recorded)

    def close(self) -> None:
        """Training has ended: write what there is."""
        if self._recorded is not None:
            self._write(self._recorded)
        elif self._is_due:
            self._is_due = False
            self._console.line(
                f"no trace: this run had none of the iterations {self._first} to {self._last} of "
                "--hetero-trace-steps"
            )

    def _write(self, recorded: SpanRecorder) -> None:
        self._recorded = None
        recorded.stop()
        assert self._clocks is not None
        self._clocks.measure()
        lines = _gather_on_rank_0(self._own(recorded).to_json())
        if not lines:
            return
        path = Path(self._folder) / FILE
        try:
            traces = [
                replace(RankTrace.from_json(line), alignment=self._clocks.alignment(rank))
                for rank, line in enumerate(lines)
            ]
            path.parent.mkdir(parents=True, exist_ok=True)
            write_trace(chrome_trace(traces, about=self._about()), path)
        except Exception as error:  # what shows a run must not end it
            self._console.warning(f"the trace was not written to {path}: {error}")
            return
        iterations = sorted({step.iteration for trace in traces for step in trace.steps})
        self._console.line(
            f"wrote {path}, the trace of {spans(iterations, 'iteration')} on "
            f"{counted(len(traces), 'rank')}; {clock_sentence(traces)}"
        )
        if missing := [trace.rank for trace in traces if trace.problem]:
            problem = traces[missing[0]].problem
            self._console.warning(f"the trace lacks {spans(missing)}: {problem}")
        if cut := [trace.rank for trace in traces if trace.is_truncated]:
            self._console.warning(
                f"the trace lacks the end of {spans(cut)}, after {MOST_SPANS} phases; trace fewer "
                "steps"
            )

    def _own(self, recorded: SpanRecorder) -> RankTrace:
        job = self._job
        own = job.identities[job.rank]
        trace = RankTrace(
            rank=job.rank,
            host=own.host,
            stage=job.coordinate.stage,
            mesh=job.coordinate.mesh,
            vendor=own.vendor,
            simulated=own.simulated,
        )
        try:
            return recorded.result(trace, self._schedule.passes)
        except Exception as error:  # this rank still has to take part in gathering
            return replace(trace, problem=f"{type(error).__name__}: {error}")

    def _about(self) -> dict[str, Any]:
        plan = self._job.plan
        return {
            "version": __version__,
            "stages": plan.stages,
            "chunks": plan.chunks,
            "whole_replicas": plan.whole_replicas,
            "simulated": self._job.simulated,
            "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }


class Clocks:
    """How the clocks of all ranks compare with rank 0's, as far as rank 0 knows. Collective."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """`now`: the clock whose times are to be turned."""
        self._now = now
        identities = _all_gathered(clock_identity())
        self._leaders = [identities.index(identity) for identity in identities]
        """For each rank the first one that reads the same clock."""
        self._measured: list[dict[int, Offset]] = []

    def measure(self) -> None:
        """Measure the offsets now. Rank 0 exchanges messages with one rank for each clock."""
        rank, offsets = dist.get_rank(), {}
        for leader in sorted(set(self._leaders) - {0}):
            if rank == 0:
                offsets[leader] = self._ping(leader)
            elif rank == leader:
                self._answer()
        self._measured.append(offsets)

    def alignment(self, rank: int) -> Alignment:
        """On rank 0, after two measurements: how a rank's times become rank 0's."""
        leader = self._leaders[rank]
        if leader == 0:
            return SHARED
        return Alignment(self._measured[0][leader], self._measured[-1][leader])

    def _ping(self, peer: int) -> Offset:
        pings = []
        for _ in range(PINGS):
            message = torch.zeros(1, dtype=torch.float64)
            left = self._now()
            dist.send(message, peer)
            dist.recv(message, peer)
            pings.append(Ping(left, float(message), self._now()))
        return offset_of(pings)

    def _answer(self) -> None:
        message = torch.zeros(1, dtype=torch.float64)
        for _ in range(PINGS):
            dist.recv(message, 0)
            message[0] = self._now()
            dist.send(message, 0)


def _all_gathered(text: str) -> list[str]:
    """A short text of every rank. Collective."""
    mine = torch.zeros(256, dtype=torch.uint8)
    line = text.encode()[: mine.numel()]
    mine[: len(line)] = torch.tensor(list(line), dtype=torch.uint8)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return [bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in gathered]


def _gather_on_rank_0(line: bytes) -> list[bytes]:
    """Every rank's bytes on rank 0, an empty list on the others. Collective."""
    packed = torch.frombuffer(bytearray(zlib.compress(line, 1)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([packed.numel()]))
    if dist.get_rank() != 0:
        dist.send(packed, 0)
        return []
    lines = [line]
    for rank, size in enumerate(sizes[1:], start=1):
        received = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(received, rank)
        lines.append(zlib.decompress(received.numpy().tobytes()))
    return lines
