"""From flags to the options of links."""

from __future__ import annotations

import argparse
import socket

from hetero.addresses import family_of
from hetero.errors import UserError
from hetero.link.nics import Nics, find_nics
from hetero.link.open import ChannelOptions


def channel_options(args: argparse.Namespace, own: str) -> ChannelOptions:
    """Sizes, checks and rails; `own` is the address by which this rank reaches the others."""
    nics = find_rails(args, own=own, family=family_of(own))
    return ChannelOptions(
        ring_bytes=args.hetero_ring_mib << 20,
        chunk_bytes=args.hetero_chunk_kib << 10 if args.hetero_chunk_kib else None,
        checksum=args.hetero_checksum,
        connections=args.hetero_tcp_connections,
        addresses=nics.addresses,
        rdma_devices=nics.rdma,
    )


def find_rails(
    args: argparse.Namespace, *, own: str, family: socket.AddressFamily | None = None
) -> Nics:
    """What --hetero-nics names on this host. UserError where there is no such thing."""
    try:
        return find_nics(args.hetero_nics or (), own=own, family=family)
    except ValueError as error:
        raise UserError(f"--hetero-nics on {socket.gethostname()}: {error}") from error
