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

    def _communicate(self, **call: Any) -> tuple[Any, Any, Any]:
        *received, handles = super()._communicate(**call)
        if handles:
            handles = {key: PendingWork(work) for key, work in handles.items()}
            self._pending += handles.values()
        return (*received, handles)

    def finish(self) -> None:
        """Call after each step: waits for what is pending, within the group's time limit."""
        for work in self._pending:
            work.wait()
        self._pending.clear()
