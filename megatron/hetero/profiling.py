"""--profile: profiles some steps of some ranks with torch.profiler or NVIDIA's nsys."""

from __future__ import annotations

import argparse
from typing import Any

import torch


class StepProfiler:
    """Profiles the steps from --profile-step-start up to --profile-step-end.

    Steps count as in Megatron: 10 to 12 profiles the two steps after the tenth. torch.profiler
    writes one trace per profiled rank to --tensorboard-dir; without --use-pytorch-profiler the
    range is marked for `nsys --capture-range=cudaProfilerApi`.
    """

    def __init__(self, args: argparse.Namespace, *, rank: int, device: torch.device) -> None:
        self._start, self._end = args.profile_step_start, args.profile_step_end
        self._enabled = args.profile and rank in args.profile_ranks
        self._on_gpu = device.type == "cuda"
        self._running = False
        self._torch: Any = None
        if not self._enabled or not args.use_pytorch_profiler:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._on_gpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._torch = torch.profiler.profile(
            activities=activities,
            record_shapes=True,
            on_trace_ready=torch.profiler.tensorboard_trace_handler(
                args.tensorboard_dir, worker_name=f"rank-{rank}"
            ),
        )

    def before_step(self, steps_done: int) -> None:
        if not self._enabled or steps_done != self._start:
            return
        self._running = True
        if self._torch is not None:
            self._torch.start()
        elif self._on_gpu:
            torch.cuda.profiler.start()

    def after_step(self, steps_done: int) -> None:
        if self._running and self._torch is not None:
            self._torch.step()
        if steps_done >= self._end:
            self.close()

    def close(self) -> None:
        """Stop and write the trace, if a profile is running."""
        if not self._running:
            return
        self._running = False
        if self._torch is not None:
            self._torch.stop()
        elif self._on_gpu:
            torch.cuda.profiler.stop()
