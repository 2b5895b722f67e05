"""Pipeline edges inside a mesh of GPUs: the vendor library's send and receive behind `Link`.

The library matches transfers by order alone, so each direction has a communicator. Messages carry
no header and so no tag: reading one would make the host wait for the GPU.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hetero.link.base import Link, LinkDescription, Work, as_bytes, require_contiguous, sendable


@dataclass
class _VendorWork(Work):
    link: Link
    work: dist.Work
    tensor: torch.Tensor
    """Kept so that the caller may drop it: its memory is in use until the transfer ends."""

    def wait(self) -> None:
        try:
            # With a timeout the library would block the calling thread, on every wait.
            self.work.wait()
        except Exception as error:
            raise self.link.failure(
                f"the vendor library failed ({str(error).splitlines()[0][:200]})",
                expected=f"a tensor of shape {tuple(self.tensor.shape)}",
                remedy=f"see the log of rank {self.link.description.peer}",
            ) from error

    def is_completed(self) -> bool:
        return self.work.is_completed()


class VendorLink(Link):
    """A link over two communicators of the vendor library, one for each direction.

    A transfer that never ends is the library's to notice: its watchdog ends the process when the
    groups' timeout is over. Opening is collective between the two ends.
    """

    transport = "nccl"
    receives_ahead = False  # The library's kernel waits on the GPU, and holds a part of it.

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
        self._warm_up()

    def send(self, tensor: torch.Tensor, *, tag: int = 0) -> Work:
        self._require_open()
        source = sendable(tensor)
        while self._in_flight and self._in_flight[0].is_completed():
            self._in_flight.popleft()
        work = dist.isend(as_bytes(source), self.description.peer, group=self._send_group)
        transfer = self._transfer(work, source)
        self._in_flight.append(transfer)
        self._count(source.nbytes, is_receive=False)
        self._record(source, transfer, is_receive=False)
        return transfer

    def recv(self, tensor: torch.Tensor, *, tag: int = 0) -> Work:
        self._require_open()
        require_contiguous(tensor)
        target = tensor.detach()
        work = dist.irecv(as_bytes(target), self.description.peer, group=self._recv_group)
        self._count(target.nbytes, is_receive=True)
        transfer = self._transfer(work, target)
        self._record(target, transfer, is_receive=True)
        return transfer

    def close(self) -> None:
        self._closed = True
        self._in_flight.clear()

    def _warm_up(self) -> None:
        """Make both communicators now, in one order on both ends.

        The library makes a communicator in its first transfer and blocks the host until the peer
        joins in: two ends that both send first would wait for each other for ever.
        """
        groups = [self._send_group, self._recv_group]
        if self.description.rank > self.description.peer:
            groups.reverse()
        token = torch.zeros(1, device=torch.cuda.current_device())
        for group in groups:
            if group is self._send_group:
                dist.send(token, self.description.peer, group=group)
            else:
                dist.recv(token, self.description.peer, group=group)
        torch.cuda.synchronize()

    def _transfer(self, work: dist.Work | None, tensor: torch.Tensor) -> _VendorWork:
        if work is None:
            raise RuntimeError(f"rank {self.description.rank} is not in the link's group")
        return _VendorWork(self, work, tensor)
