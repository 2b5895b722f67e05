"""Messages of one call between ranks of different vendors, each direction led by a header.

The first message of a call to a peer says what is called. A peer that has called something else
says so at once, instead of taking the bytes for its own.
"""

from __future__ import annotations

import torch

from hetero.collectives.calls import HEADER_BYTES, Call, header_text
from hetero.collectives.layout import Layout
from hetero.collectives.links import LinkTo, Transfer
from hetero.collectives.vendor_library import VendorLibrary


class MismatchError(RuntimeError):
    """A peer called another operation than this rank."""


class Exchange:
    """The messages of one call. Peers are ranks of the group."""

    def __init__(
        self,
        *,
        layout: Layout,
        library: VendorLibrary | None,
        link_to: LinkTo,
        call: Call,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.library = library
        """None where this rank is its vendor's only one."""
        self._link_to, self._call, self._device = link_to, call, device
        self._greeted: set[int] = set()
        self._heard: set[int] = set()
        self._header = torch.frombuffer(bytearray(call.header()), dtype=torch.uint8)

    def compare_inside(self) -> None:
        """Compare this call with those of the vendor's own ranks; their library compares nothing.

        Raises MismatchError before anything that differs is given to the library.
        """
        nothing = self._header.new_empty(0)
        sent = [t for rank in self.layout.team for t in self.send(rank, nothing)]
        for rank in self.layout.team:
            self.recv(rank, nothing)
        wait_all(sent)

    def send(self, rank: int, tensor: torch.Tensor) -> list[Transfer]:
        """Send contiguous memory. The transfers have to be waited for."""
        link = self._link_to(rank)
        transfers = []
        if rank not in self._greeted:
            self._greeted.add(rank)
            transfers.append(link.send(self._header.to(self._device)))
        if tensor.numel():
            transfers.append(link.send(tensor))
        return transfers

    def recv(self, rank: int, tensor: torch.Tensor) -> list[Transfer]:
        """Receive into contiguous memory, after the header if it is the first of this call."""
        link = self._link_to(rank)
        if rank not in self._heard:
            self._heard.add(rank)
            header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=self._device)
            link.recv(header).wait()
            self._compare(rank, header)
        return [link.recv(tensor)] if tensor.numel() else []

    def _compare(self, rank: int, header: torch.Tensor) -> None:
        if torch.equal(header, self._header.to(self._device)):
            return
        member = self.layout.members[rank]
        raise MismatchError(
            f"{member} called {header_text(bytes(header.tolist()))} while rank "
            f"{self.layout.members[self.layout.rank].global_rank} called {self._call}"
        )


def wait_all(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()
    transfers.clear()
