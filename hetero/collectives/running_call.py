"""A group's call on its way: its algorithm, and how far that has come."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hetero.collectives.calls import Call
from hetero.collectives.p2p_batch import CallContext, P2PBatch, Schedule
from hetero.collectives.work import CollectiveWork

Algorithm = Callable[[CallContext], Schedule]


class RunningCall:
    """A call and how far its schedule has come: one thread may start it and another finish it."""

    __slots__ = (
        "_context",
        "_pending",
        "_schedule",
        "algorithm",
        "call",
        "in_inference_mode",
        "is_started",
        "work",
    )

    def __init__(
        self, call: Call, work: CollectiveWork, algorithm: Algorithm, context: CallContext
    ) -> None:
        self.call, self.work, self.algorithm = call, work, algorithm
        self.is_started = False
        self.in_inference_mode = any(map(torch.Tensor.is_inference, work.result()))
        """Whether its tensors are of inference mode, which is not that of another thread."""
        self._context, self._schedule = context, algorithm(context)
        self._pending: P2PBatch | None = None

    def progress(self, *, blocking: bool) -> bool:
        """Run it until it is done, or without `blocking` until a peer must come; whether done."""
        self._context.may_block = blocking
        if not self.is_started:
            self.is_started = True
            self._pending = next(self._schedule, None)
        while self._pending is not None:
            if blocking:
                self._pending.wait()
            elif not self._pending.poll():
                return False
            self._pending = next(self._schedule, None)
        return True
