"""megatron-core's pipeline p2p over links.

Every call of megatron-core's schedules ends in one private method of `P2PCommunicator` (see
`megatron/core/pipeline_parallel/p2p_communication.py`), which is replaced here. This one
differs from theirs in two ways that matter:

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
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from hetero.link.base import Work
from hetero.pipeline.groups import StageOrder
from hetero.pipeline.links import Neighbour

_PROGRESS_BYTES = 1 << 20
"""Up to this, waking the links' monitor takes longer than the transfer."""

Tensor = torch.Tensor | None


@dataclass
class _Side:
    """One neighbour, and the receive that was posted ahead."""

    neighbour: Neighbour | None
    expected: int = 0
    """Tensors to be received whose receive has not been posted."""
    posted: tuple[torch.Tensor, Work] | None = None


class PipelineCommunicator(P2PCommunicator):
    """One rank's pipeline neighbours, in the form that megatron-core's schedules expect.

    Args:
        pp_group: the pipeline's group, for the schedules: its size and this rank's number.
        config: megatron-core's TransformerConfig, for the dtype of what crosses a stage.
        upstream: the previous stage, None on the first (unless interleaved).
        downstream: the next stage, None on the last (unless interleaved).
        device: where received tensors are placed.
        after_gradient: called whenever a gradient is on its way upstream: for work that may wait
            until then.
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
        # Not the base's, which looks for global ranks: a StageOrder has none.
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

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor,
        tensor_send_prev: Tensor,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[Tensor, Tensor, dict[str, Work]]:
        """Activations, gradients, and the handles under the names that schedules look them up by.

        `wait_on_reqs` is for receives.
        """
        handles: dict[str, Work] = {}
        if tensor_send_next is not None:
            handles["send_next"] = _required(self._downstream).send(tensor_send_next)
        if tensor_send_prev is not None:
            handles["send_prev"] = _required(self._upstream).send(tensor_send_prev)
            self._after_gradient()
        activations = gradients = None
        if recv_prev:
            activations, handles["recv_prev"] = self._take(self._upstream, tensor_shape)
        if recv_next:
            gradients, handles["recv_next"] = self._take(self._downstream, tensor_shape)
        for name in ("recv_prev", "recv_next") if wait_on_reqs else ():
            if name in handles:
                handles[name].wait()
        for tensor in (activations, gradients, tensor_send_next, tensor_send_prev):
            if tensor is not None:
                self._post_ahead(self._upstream, tensor.shape)
                self._post_ahead(self._downstream, tensor.shape)
                break
        return activations, gradients, handles

    def _take(self, side: _Side, shape: Sequence[int]) -> tuple[torch.Tensor, Work]:
        """The receive that was posted ahead, or a new one."""
        self._post_ahead(side, shape)
        taken = side.posted or self._receive(side, shape)
        side.posted = None
        return taken

    def _post_ahead(self, side: _Side, shape: Sequence[int]) -> None:
        """Post the next receive, if one is expected and none is posted."""
        if side.expected and side.posted is None:
            side.expected -= 1
            tensor, work = side.posted = self._receive(side, shape)
            if tensor.nbytes > _PROGRESS_BYTES:
                # Polling requests progress, which else only `wait` makes.
                work.is_completed()

    def _receive(self, side: _Side, shape: Sequence[int]) -> tuple[torch.Tensor, Work]:
        tensor = torch.empty(
            tuple(shape),
            dtype=self.config.pipeline_dtype,
            device=self._device,
            requires_grad=True,
        )
        return tensor, _required(side).recv(tensor)


def _required(side: _Side) -> Neighbour:
    if side.neighbour is None:
        raise RuntimeError("the schedule asked for a neighbour that the plan does not have")
    return side.neighbour
