"""Times the p2p calls of a pipeline communicator, megatron-core's own or ours."""

from __future__ import annotations

from typing import Any

from megatron.training.timing.timers import NO_TIMER, Timer, Timers

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


class TimedCommunicator:
    """Wraps a communicator with a timer around each of the nine methods that schedules call.

    Timers have megatron-core's names. Unlike megatron-core's, they also cover the `wait()` of
    overlapped transfers.
    """

    def __init__(self, inner: Any, timers: Timers) -> None:
        self._inner, self._timers = inner, timers
        self.pp_group = inner.pp_group
        self.config = inner.config
        self.virtual_pipeline_model_parallel_size = inner.virtual_pipeline_model_parallel_size

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool) -> Any:
        with self._timer("forward-recv", unless=is_first_stage):
            return self._inner.recv_forward(tensor_shapes, is_first_stage)

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Any:
        with self._timer("backward-recv", unless=is_last_stage):
            return self._inner.recv_backward(tensor_shapes, is_last_stage)

    def send_forward(self, output_tensors: Any, is_last_stage: bool) -> None:
        with self._timer("forward-send", unless=is_last_stage):
            self._inner.send_forward(output_tensors, is_last_stage)

    def send_backward(self, input_tensor_grads: Any, is_first_stage: bool) -> None:
        with self._timer("backward-send", unless=is_first_stage):
            self._inner.send_backward(input_tensor_grads, is_first_stage)

    def send_forward_recv_backward(
        self, output_tensors: Any, tensor_shapes: Any, is_last_stage: bool
    ) -> Any:
        with self._timer("forward-send-backward-recv", unless=is_last_stage):
            return self._inner.send_forward_recv_backward(
                output_tensors, tensor_shapes, is_last_stage
            )

    def send_backward_recv_forward(
        self, input_tensor_grads: Any, tensor_shapes: Any, is_first_stage: bool
    ) -> Any:
        with self._timer("backward-send-forward-recv", unless=is_first_stage):
            return self._inner.send_backward_recv_forward(
                input_tensor_grads, tensor_shapes, is_first_stage
            )

    def send_forward_recv_forward(
        self,
        output_tensor: Any,
        recv_prev: bool,
        tensor_shape: Any,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        # A receive that is only posted is not waited for here.
        part = "wait prev" if recv_prev and not overlap_p2p_comm else "wait next"
        with self._timers("forward-send-forward-recv", part=part):
            result = self._inner.send_forward_recv_forward(
                output_tensor, recv_prev, tensor_shape, overlap_p2p_comm
            )
        return self._with_timed_handles(result) if overlap_p2p_comm else result

    def send_backward_recv_backward(
        self,
        input_tensor_grad: Any,
        recv_next: bool,
        tensor_shape: Any,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        part = "wait next" if recv_next and not overlap_p2p_comm else "wait prev"
        with self._timers("backward-send-backward-recv", part=part):
            result = self._inner.send_backward_recv_backward(
                input_tensor_grad, recv_next, tensor_shape, overlap_p2p_comm
            )
        return self._with_timed_handles(result) if overlap_p2p_comm else result

    def send_forward_backward_recv_forward_backward(
        self,
        output_tensor: Any,
        input_tensor_grad: Any,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
    ) -> Any:
        part = "wait both"
        if recv_prev != recv_next:
            part = "wait prev" if recv_prev else "wait next"
        with self._timers("forward-backward-send-forward-backward-recv", part=part):
            return self._inner.send_forward_backward_recv_forward_backward(
                output_tensor, input_tensor_grad, recv_prev, recv_next, tensor_shape
            )

    def _timer(self, name: str, *, unless: bool) -> Timer:
        """No timer at the pipeline's ends, where the schedules call without a peer."""
        return NO_TIMER if unless else self._timers(name)

    def _with_timed_handles(self, result: tuple[Any, Any]) -> tuple[Any, Any]:
        received, handles = result
        if not handles:
            return received, handles
        return received, {
            key: TimedWork(work, self._timers, _WAITS[key]) for key, work in handles.items()
        }
