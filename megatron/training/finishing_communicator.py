"""megatron-core's pipeline communicator for steps that end only when all has been sent."""

from __future__ import annotations

from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator


class PendingWork:
    """An asynchronous transfer that remembers whether it was waited for: gloo allows it once."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


class FinishingCommunicator(P2PCommunicator):
    """Completes the overlapped sends that the schedule itself does not wait for.

    megatron-core's interleaved evaluation drops the handle of its last send. gloo cancels a send
    whose handle is gone, and the next stage would wait for it until the group's time limit.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._pending: list[PendingWork] = []

    def send_forward_recv_forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._kept(super().send_forward_recv_forward(*args, **kwargs))

    def send_backward_recv_backward(self, *args: Any, **kwargs: Any) -> Any:
        return self._kept(super().send_backward_recv_backward(*args, **kwargs))

    def finish(self) -> None:
        """Call after each step: waits for what is pending, within the group's time limit."""
        for work in self._pending:
            work.wait()
        self._pending.clear()

    def _kept(self, result: Any) -> Any:
        # With overlap it is a tensor and the handles, else the tensor alone.
        if not isinstance(result, tuple) or not result[1]:
            return result
        received, handles = result
        kept = {key: PendingWork(work) for key, work in handles.items()}
        self._pending += kept.values()
        return received, kept
