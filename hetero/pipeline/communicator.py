"""megatron-core's pipeline p2p over links.

megatron-core's schedules take any object with these nine methods (see `P2PCommunicator` in
`megatron/core/pipeline_parallel/p2p_communication.py`, 0.16.1). This one differs from theirs in two
ways that matter:

- each edge of the pipeline has its own link, so that activations and gradients between the same two
  ranks cannot be confused, in whatever order they are posted;
- it never waits for sends. The link keeps the tensor's memory alive, so the schedule may drop or
  deallocate its output at once, and two stages that both send first cannot deadlock.

With the number of micro-batches known (`expect`), it posts the next receive as soon as it has
delivered a tensor, so that transfers overlap with computing. The interleaved schedules do so
themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hetero.groups import StageOrder
from hetero.link.base import Work
from hetero.pipeline.links import Neighbour

_PROGRESS_BYTES = 1 << 20
"""Up to this, waking the link's thread takes longer than the transfer."""

Shape = Sequence[int]
Tensors = torch.Tensor | None | list[torch.Tensor | None]


@dataclass
class _Side:
    """One neighbour, and the receive that was posted ahead."""

    neighbour: Neighbour | None
    expected: int = 0
    """Tensors to be received whose receive has not been posted."""
    posted: tuple[torch.Tensor, Work] | None = None


class PipelineCommunicator:
    """One rank's pipeline neighbours, in the form that megatron-core's schedules expect.

    Args:
        pp_group: the pipeline's group, for the schedules: its size and this rank's number.
        config: megatron-core's TransformerConfig, for the dtype of what crosses a stage.
        upstream: the previous stage, None on the first (unless interleaved).
        downstream: the next stage, None on the last (unless interleaved).
        device: where received tensors are placed.
        after_gradient: called after each backward send, also on the first stage, where there is
            none: for work that may wait until then.
    """

    def __init__(
        self,
        *,
        pp_group: dist.ProcessGroup | StageOrder,
        config: Any,
        upstream: Neighbour | None,
        downstream: Neighbour | None,
        device: torch.device,
        after_gradient: Callable[[], None] = lambda: None,
    ) -> None:
        self.pp_group = pp_group
        self.config = config
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size
        self._upstream, self._downstream = _Side(upstream), _Side(downstream)
        self._device = device
        self._after_gradient = after_gradient

    def expect(self, *, activations: int, gradients: int) -> None:
        """Set how many of each a non-interleaved schedule will receive, all of one shape."""
        for side, count in ((self._upstream, activations), (self._downstream, gradients)):
            receives = side.neighbour is not None and side.neighbour.receives_ahead
            side.expected = count if receives else 0

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool) -> Tensors:
        """Receive activations, each (sequence, micro-batch, hidden), from the previous stage."""
        return self._each_shape(tensor_shapes, self._upstream, wanted=not is_first_stage)

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Tensors:
        """Receive gradients of this stage's output from the next stage."""
        return self._each_shape(tensor_shapes, self._downstream, wanted=not is_last_stage)

    def send_forward(self, output_tensors: Tensors, is_last_stage: bool) -> None:
        if not is_last_stage:
            self._send_each(output_tensors, self._downstream)

    def send_backward(self, input_tensor_grads: Tensors, is_first_stage: bool) -> None:
        if not is_first_stage:
            self._send_each(input_tensor_grads, self._upstream)
        self._after_gradient()

    def send_forward_recv_backward(
        self, output_tensors: Tensors, tensor_shapes: Any, is_last_stage: bool
    ) -> Tensors:
        self.send_forward(output_tensors, is_last_stage)
        received = self.recv_backward(_as_list(tensor_shapes), is_last_stage)
        return _like(output_tensors, received)

    def send_backward_recv_forward(
        self, input_tensor_grads: Tensors, tensor_shapes: Any, is_first_stage: bool
    ) -> Tensors:
        self.send_backward(input_tensor_grads, is_first_stage)
        received = self.recv_forward(_as_list(tensor_shapes), is_first_stage)
        return _like(input_tensor_grads, received)

    def send_forward_recv_forward(
        self,
        output_tensor: torch.Tensor | None,
        recv_prev: bool,
        tensor_shape: Shape,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        """Pass activations on and take the next ones. With overlap also returns the handles."""
        handles: dict[str, Work] = {}
        self._post_send("send_next", output_tensor, self._downstream, handles)
        received = self._post_recv("recv_prev", recv_prev, tensor_shape, self._upstream, handles)
        return _deliver(received, handles, overlap=overlap_p2p_comm)

    def send_backward_recv_backward(
        self,
        input_tensor_grad: torch.Tensor | None,
        recv_next: bool,
        tensor_shape: Shape,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        """Pass gradients back and take the next ones. With overlap also returns the handles."""
        handles: dict[str, Work] = {}
        self._post_send("send_prev", input_tensor_grad, self._upstream, handles)
        received = self._post_recv("recv_next", recv_next, tensor_shape, self._downstream, handles)
        return _deliver(received, handles, overlap=overlap_p2p_comm)

    def send_forward_backward_recv_forward_backward(
        self,
        output_tensor: torch.Tensor | None,
        input_tensor_grad: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Shape,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        handles: dict[str, Work] = {}
        self._post_send("send_next", output_tensor, self._downstream, handles)
        self._post_send("send_prev", input_tensor_grad, self._upstream, handles)
        forward = self._post_recv("recv_prev", recv_prev, tensor_shape, self._upstream, handles)
        backward = self._post_recv("recv_next", recv_next, tensor_shape, self._downstream, handles)
        _wait_received(handles)
        return forward, backward

    def _each_shape(self, tensor_shapes: Any, side: _Side, *, wanted: bool) -> Tensors:
        shapes = _as_list(tensor_shapes)
        tensors = [self._take(side, shape) if wanted else None for shape in shapes]
        for ahead in (self._upstream, self._downstream):
            self._post_ahead(ahead, shapes[0])
        return tensors if shapes is tensor_shapes else tensors[0]

    def _take(self, side: _Side, shape: Shape) -> torch.Tensor:
        self._post_ahead(side, shape)
        tensor, work = side.posted or self._receive(side, shape)
        side.posted = None
        work.wait()
        return tensor

    def _post_ahead(self, side: _Side, shape: Shape) -> None:
        """Post the next receive, if one is expected and none is posted."""
        if side.expected and side.posted is None:
            side.expected -= 1
            tensor, work = side.posted = self._receive(side, shape)
            if tensor.nbytes > _PROGRESS_BYTES:
                # Polling requests progress, which else only `wait` makes.
                work.is_completed()

    def _receive(self, side: _Side, shape: Shape) -> tuple[torch.Tensor, Work]:
        tensor = torch.empty(
            tuple(shape),
            dtype=self.config.pipeline_dtype,
            device=self._device,
            requires_grad=True,
        )
        return tensor, _required(side).recv(tensor)

    def _send_each(self, tensors: Tensors, side: _Side) -> None:
        for tensor in tensors if isinstance(tensors, list) else [tensors]:
            self._post_send("send", tensor, side, {})

    def _post_send(
        self,
        name: str,
        tensor: torch.Tensor | None,
        side: _Side,
        handles: dict[str, Work],
    ) -> None:
        if tensor is not None:
            handles[name] = _required(side).send(tensor)

    def _post_recv(
        self,
        name: str,
        wanted: bool,
        shape: Shape,
        side: _Side,
        handles: dict[str, Work],
    ) -> torch.Tensor | None:
        if not wanted:
            return None
        tensor, handles[name] = self._receive(side, shape)
        return tensor


def _required(side: _Side) -> Neighbour:
    if side.neighbour is None:
        raise RuntimeError("the schedule asked for a neighbour that the plan does not have")
    return side.neighbour


def _deliver(received: torch.Tensor | None, handles: dict[str, Work], *, overlap: bool) -> Any:
    if overlap:
        return received, handles
    _wait_received(handles)
    return received


def _wait_received(handles: dict[str, Work]) -> None:
    for name, work in handles.items():
        if name.startswith("recv"):
            work.wait()


def _as_list(tensor_shapes: Any) -> list[Shape]:
    """The schedules pass one shape, or a list of them."""
    if isinstance(tensor_shapes, list) and not any(isinstance(d, int) for d in tensor_shapes):
        return tensor_shapes
    return [tensor_shapes]


def _like(model: Tensors, received: Tensors) -> Tensors:
    """Give back a list for a list and one tensor for one."""
    if isinstance(model, list) or not isinstance(received, list):
        return received
    return received[0]
