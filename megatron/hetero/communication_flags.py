"""Converts flags to process-group backends and link options."""

from __future__ import annotations

import argparse
import socket

import torch

from hetero.errors import UserError
from hetero.link.nics import Nics, find_nics
from hetero.link.open import ChannelOptions
from hetero.pipeline.groups import CROSSING_BACKEND
from hetero.plan import Plan
from hetero.startup.addresses import family_of


def group_backends(args: argparse.Namespace, device: torch.device) -> tuple[str, str]:
    """The backend of groups inside a vendor, and that of groups that reduce across vendors."""
    if args.distributed_backend == "gloo":
        return "gloo", "gloo"
    return "nccl" if device.type == "cuda" else "gloo", CROSSING_BACKEND


def require_links(args: argparse.Namespace, plan: Plan) -> None:
    """Refuse a pipeline of GPUs without links: gloo cannot send GPU tensors point-to-point."""
    if plan.stages > 1 and not args.hetero_pipeline:
        raise UserError(
            "--distributed-backend gloo cannot join pipeline stages on GPUs of one vendor; give "
            "--hetero-pipeline with --hetero-transport gloo, or leave it out"
        )


def channel_options(args: argparse.Namespace, own: str) -> ChannelOptions:
    """Options of every link. `own` is the address through which other hosts reach this rank."""
    return ChannelOptions(
        ring_bytes=args.hetero_ring_mib << 20,
        chunk_bytes=args.hetero_chunk_kib << 10 if args.hetero_chunk_kib else None,
        checksum=args.hetero_checksum,
        connections=args.hetero_tcp_connections,
        nics=find_rails(args, own=own, family=family_of(own)),
    )


def find_rails(
    args: argparse.Namespace, *, own: str, family: socket.AddressFamily | None = None
) -> Nics:
    """Resolve --hetero-nics on this host. Raises UserError for an unknown device or interface."""
    try:
        return find_nics(args.hetero_nics or (), own=own, family=family)
    except ValueError as error:
        raise UserError(f"--hetero-nics on {socket.gethostname()}: {error}") from error
