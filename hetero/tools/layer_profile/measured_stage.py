"""One pipeline stage on one device, alone: how long its passes take and what it keeps in memory.

The stage is the run's own, built from the same flags by the same code. Where it is one of several
tensor-parallel ranks it has that rank's shapes, and what the others would send is not waited for.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model

from hetero.data.layer_times import GpuClock, HostClock
from hetero.data.slowdown import slow_down
from hetero.plan import Mesh, Plan
from hetero.planner.layer_profile import PassTimes
from megatron.hetero.core_private import fake_process_groups
from megatron.hetero.experts import forget_router_losses
from megatron.hetero.model import StageModel, build_model, torch_dtype

FIRST, MIDDLE, LAST = 0, 1, 2
_WARM_UP, _AT_LEAST, _AT_MOST = 2, 3, 100


@dataclass(frozen=True)
class StageMemory:
    """What one micro-batch takes of a stage's memory, beside weights and gradients."""

    activation_bytes: int
    """Held from the forward pass to the backward pass."""
    working_bytes: int
    """The most held beyond that during either pass."""


class MeasuredStage:
    """The first, a middle or the last stage of a pipeline, with random weights."""

    def __init__(self, args: argparse.Namespace, model: StageModel, plan: Plan, stage: int) -> None:
        self.args, self.model, self.plan = args, model, plan
        self.rank = plan.rank_at(stage)
        self._chunk = model.chunks[0]
        self._device = next(self._chunk.parameters()).device
        self._stage = stage
        _fill(self._chunk, std=args.init_method_std)

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._chunk.parameters())

    def times(self, *, micro_batch: int, seq_length: int, seconds: float) -> PassTimes:
        """Means of passes timed for about `seconds`, a few of them at the least.

        The passes of a step follow each other, so it takes their mean and not their median.
        """
        inputs = self._inputs(micro_batch, seq_length)
        for _ in range(_WARM_UP):
            self._backward(self._forward(inputs))
            self.model.fp8.end_step()  # later steps know the maxima of delayed scaling
        clock = clock_of(self._device)
        marks: list[tuple[Any, Any, Any]] = []
        until = time.monotonic() + seconds
        while len(marks) < _AT_LEAST or (time.monotonic() < until and len(marks) < _AT_MOST):
            begin = clock.mark()
            output = self._forward(inputs)
            middle = clock.mark()
            self._backward(output)
            marks.append((begin, middle, clock.mark()))
            if len(marks) % _AT_LEAST == 0:
                synchronize(self._device)  # the host's watch would else run ahead of the GPU
        return PassTimes(
            statistics.fmean(clock.seconds(begin, middle) for begin, middle, _ in marks),
            statistics.fmean(clock.seconds(middle, end) for _, middle, end in marks),
        )

    def memory(self, *, micro_batch: int, seq_length: int) -> StageMemory:
        inputs = self._inputs(micro_batch, seq_length)
        self._backward(self._forward(inputs))  # gradients are there from the first one on
        if self._device.type != "cuda":
            return self._memory_of_host(inputs)
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        output = self._forward(inputs)
        kept = torch.cuda.memory_allocated(self._device) - before
        self._backward(output)
        del output
        peak = torch.cuda.max_memory_allocated(self._device) - before
        return StageMemory(kept, max(peak - kept, 0))

    def _memory_of_host(self, inputs: dict[str, Any]) -> StageMemory:
        own = {_storage(tensor)[0] for tensor in self._chunk.parameters()}
        activities = [torch.profiler.ProfilerActivity.CPU]
        watched = torch.profiler.profile(activities=activities, profile_memory=True)
        with _saved_storages() as saved, watched as seen:
            output = self._forward(inputs)
            saved |= dict([_storage(output)])
            kept = sum(size for place, size in saved.items() if place not in own)
            self._backward(output)
        return StageMemory(kept, max(_peak_allocated_bytes(seen) - kept, 0))

    def _inputs(self, micro_batch: int, seq_length: int) -> dict[str, Any]:
        """What the schedule would hand over."""
        tokens = torch.randint(
            self.args.padded_vocab_size, (micro_batch, seq_length), device=self._device
        )
        positions = torch.arange(seq_length, device=self._device).expand_as(tokens)
        if self._stage == FIRST:
            return {"tokens": tokens, "positions": positions, "hidden": None, "labels": None}
        shard = self.args.tensor_model_parallel_size if self.args.sequence_parallel else 1
        shape = seq_length // shard, micro_batch, self.args.hidden_size
        hidden = torch.randn(shape, dtype=torch_dtype(self.args.params_dtype), device=self._device)
        labels = tokens if self._stage == LAST else None
        return {"tokens": None, "positions": None, "hidden": hidden, "labels": labels}

    def _forward(self, inputs: dict[str, Any]) -> torch.Tensor:
        if inputs["hidden"] is not None:
            take = get_attr_wrapped_model(self._chunk, "set_input_tensor")
            take([inputs["hidden"].detach().requires_grad_()])
        output: torch.Tensor = self._chunk(
            inputs["tokens"], inputs["positions"], None, labels=inputs["labels"]
        )
        return output.float().sum() if self._stage == LAST else output

    def _backward(self, output: torch.Tensor) -> None:
        output.backward(None if output.dim() == 0 else torch.ones_like(output))


class _ThreadClock(HostClock):
    """The time for which this thread computes: other programs on the machine take none of it."""

    def mark(self) -> float:
        return time.thread_time()


def clock_of(device: torch.device) -> HostClock:
    """A GPU's events; on a CPU with one thread, that thread's own time."""
    if device.type == "cuda":
        return GpuClock()
    return _ThreadClock() if torch.get_num_threads() == 1 else HostClock()


@contextmanager
def measured_stage(
    args: argparse.Namespace, *, stage: int, layers: int, vendor: str, device: torch.device
) -> Iterator[MeasuredStage]:
    """Build a stage of `layers` layers, the FIRST, a MIDDLE or the LAST of three."""
    counts = [(layers if number == stage else 1,) for number in range(3)]
    plan = Plan(
        meshes=(Mesh(vendor, stages=3, tensor=args.tensor_model_parallel_size),),
        layers=tuple(counts),
    )
    own = argparse.Namespace(**vars(args))
    own.num_layers, own.pipeline_model_parallel_size = plan.num_layers, plan.stages
    rank = plan.rank_at(stage)
    release_memory(device)  # of the stage before
    with fake_process_groups(plan, rank) as groups:
        model = build_model(
            own, plan=plan, rank=rank, groups=groups, device=device, initializes=lambda _: False
        )
        model.train()
        slow_down(*model.chunks)
        forget_router_losses()
        yield MeasuredStage(own, model, plan, stage)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_memory(device: torch.device) -> None:
    """Give back what a stage has held; its modules and hooks refer to each other."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def allocated_bytes(device: torch.device) -> int:
    """Memory of all tensors on the device."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    tensors = (item for item in gc.get_objects() if isinstance(item, torch.Tensor))
    return sum(dict(_storage(t) for t in tensors if t.device.type == "cpu").values())


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's memory is, and how many bytes."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _peak_allocated_bytes(seen: Any) -> int:
    """Bytes that a CPU had allocated while `torch.profiler` watched and not freed yet, at most."""
    events = seen.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate((nbytes for _, nbytes in changes), initial=0))


@contextmanager
def _saved_storages() -> Iterator[dict[int, int]]:
    """Bytes by place of all that autograd saves for the backward pass."""
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.update([_storage(tensor)])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield saved


@torch.no_grad()
def _fill(module: torch.nn.Module, *, std: float) -> None:
    """Random matrices, and norms of one: what numbers are multiplied changes a GPU's clocks."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=std)
        else:
            parameter.fill_(1.0)
