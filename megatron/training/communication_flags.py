"""From flags to the backends of groups and the options of links."""

from __future__ import annotations

import argparse
import socket

import torch

from hetero.addresses import family_of
from hetero.errors import UserError
from hetero.groups import CROSSING_BACKEND
from hetero.link.nics import Nics, find_nics
from hetero.link.open import ChannelOptions
from hetero.plan import Plan


def group_backends(args: argparse.Namespace, device: torch.device) -> tuple[str, str]:
    """Of the groups inside a vendor, and of those across vendors that carry the model."""
    if args.distributed_backend == "gloo":
        return "gloo", "gloo"
    return "nccl" if device.type == "cuda" else "gloo", CROSSING_BACKEND


def require_links(args: argparse.Namespace, plan: Plan) -> None:
    """megatron-core would have gloo send a GPU's tensors from stage to stage, which it cannot."""
    if plan.stages > 1 and not args.hetero_pipeline:
        raise UserError(
            "--distributed-backend gloo cannot join pipeline stages on GPUs of one vendor; give "
            "--hetero-pipeline with --hetero-transport gloo, or leave it out"
        )


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
