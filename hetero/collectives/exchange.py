"""Messages of one call between ranks of a group, each with the call's tag.

A peer that has called something else is told so by its link, instead of taking the bytes for its
own.
"""

from __future__ import annotations

import torch

from hetero.collectives.calls import Call
from hetero.collectives.group_links import LinkTo, Transfer
from hetero.collectives.inside_vendor import VendorLibrary
from hetero.collectives.vendor_layout import Layout


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
        self.device = device
        self._link_to, self._tag = link_to, call.tag

    def compare_inside(self) -> None:
        """Compare this call with those of the vendor's own ranks; gloo compares nothing.

        Raises LinkError before anything that differs is given to the library.
        """
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        transfers = [self._link_to(rank).send(nothing, tag=self._tag) for rank in self.layout.team]
        transfers += [self._link_to(rank).recv(nothing, tag=self._tag) for rank in self.layout.team]
        wait_all(transfers)

    def send(self, rank: int, tensor: torch.Tensor) -> list[Transfer]:
        """Send contiguous memory. The transfers have to be waited for."""
        return [self._link_to(rank).send(tensor, tag=self._tag)] if tensor.numel() else []

    def recv(self, rank: int, tensor: torch.Tensor) -> list[Transfer]:
        """Receive into contiguous memory."""
        return [self._link_to(rank).recv(tensor, tag=self._tag)] if tensor.numel() else []


def wait_all(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()
    transfers.clear()
