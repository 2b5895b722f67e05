"""The `nccl` transport: the vendor library's own p2p (NCCL, or RCCL on a ROCm build).

It serves stages of one vendor, and is the baseline on one machine whose vendors are simulated. The
library matches transfers by order alone, so a link uses one communicator for each direction and
nothing else runs on them. Messages carry no header: reading one would make the host wait for the
GPU, and both ends of a link inside one vendor are the same program.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from hetero.transport.base import Link, LinkDescription, Work, require_contiguous


@dataclass
class _VendorWork(Work):
    link: Link
    work: dist.Work
    tensor: torch.Tensor
    """Kept so that the caller may drop it: its memory is in use until the transfer ends."""

    def wait(self) -> None:
        try:
            self.work.wait(timedelta(seconds=self.link.description.timeout))
        except Exception as error:
            raise self.link.failure(
                f"the vendor library failed ({str(error).splitlines()[0][:200]})",
                expected=f"a tensor of shape {tuple(self.tensor.shape)}",
                remedy=f"see the log of rank {self.link.description.peer}",
            ) from error

    def done(self) -> bool:
        return self.work.is_completed()


class VendorLink(Link):
    """A link over two communicators of the vendor library, one for each direction."""

    transport = "nccl"

    def __init__(
        self,
        description: LinkDescription,
        *,
        send_group: dist.ProcessGroup,
        recv_group: dist.ProcessGroup,
    ) -> None:
        super().__init__(description)
        self._send_group, self._recv_group = send_group, recv_group
        self._in_flight: deque[_VendorWork] = deque()

    def send(self, tensor: torch.Tensor) -> Work:
        source = tensor.detach().contiguous()
        while self._in_flight and self._in_flight[0].done():
            self._in_flight.popleft()
        work = dist.isend(source, self.description.peer, group=self._send_group)
        transfer = self._transfer(work, source)
        self._in_flight.append(transfer)
        self._count_sent(source)
        return transfer

    def recv(self, tensor: torch.Tensor) -> Work:
        require_contiguous(tensor)
        target = tensor.detach()
        work = dist.irecv(target, self.description.peer, group=self._recv_group)
        self._count_received(target)
        return self._transfer(work, target)

    def close(self) -> None:
        self._in_flight.clear()

    def _transfer(self, work: dist.Work | None, tensor: torch.Tensor) -> _VendorWork:
        if work is None:
            raise RuntimeError(f"rank {self.description.rank} is not in the link's group")
        return _VendorWork(self, work, tensor)
