"""Times a pipeline communicator by neighbour, megatron-core's own or ours."""

from __future__ import annotations

from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron.hetero.timing.timers import Timers

_WAITS = {
    "recv_prev": "forward-recv",
    "recv_next": "backward-recv",
    "send_prev": "backward-send",
    "send_next": "forward-send",
}
"""The timer of each handle that overlapped p2p calls return, by megatron-core's key."""


class TimedWork:
    """An asynchronous transfer whose `wait()` is timed."""

    def __init__(self, work: Any, timers: Timers, name: str) -> None:
        self._work, self._timers, self._name = work, timers, name

    def wait(self) -> None:
        with self._timers(self._name):
            self._work.wait()


def time_by_neighbour(communicator: P2PCommunicator, timers: Timers) -> None:
    """Add to megatron-core's own timers, of each call: which neighbour it waits for.

    Unlike megatron-core's, they then also cover the `wait()` of overlapped transfers.
    """
    communicate = communicator._communicate

    def timed(**call: Any) -> tuple[Any, Any, Any]:
        if part := _part(**call):
            timers.attribute(part)
        *received, handles = communicate(**call)
        if handles and not call.get("wait_on_reqs", True):
            handles = {key: TimedWork(work, timers, _WAITS[key]) for key, work in handles.items()}
        return (*received, handles)

    communicator._communicate = timed


def _part(
    *,
    tensor_send_next: Any,
    tensor_send_prev: Any,
    recv_prev: bool,
    recv_next: bool,
    wait_on_reqs: bool = True,
    **_: Any,
) -> str | None:
    """The part of an iteration that a call counts for: receives that it waits for, else sends."""
    prev, following = recv_prev, recv_next
    if not wait_on_reqs or not (recv_prev or recv_next):
        prev, following = tensor_send_prev is not None, tensor_send_next is not None
    if prev and following:
        return "wait both"
    return "wait prev" if prev else "wait next" if following else None
