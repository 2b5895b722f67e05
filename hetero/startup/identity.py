"""The identity of each rank (vendor, host, versions), and whether ranks can train together."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import InvalidVersion, Version

from hetero.errors import Faults, UserError
from hetero.plan import VENDOR_VARIABLE, VENDORS, Plan
from hetero.text import counted, ranks_on_hosts
from hetero.version import __version__, core_version, newest_core, sources

PLAN = "plan"
"""The name of the whole plan among the flags that are compared."""
_COUNT = re.compile(r"[1-9][0-9]{0,4}")


@dataclass(frozen=True)
class RankIdentity:
    """What one rank tells the others about itself before any process group exists."""

    rank: int
    local_rank: int
    host: str
    vendor: str
    actual_vendor: str
    """By hardware and PyTorch build, regardless of HETERO_VENDOR."""
    device: str
    project_version: str
    torch_version: str
    core_version: str
    flags: dict[str, Any] = field(default_factory=dict)
    """Values that all ranks must have in common, by name."""
    typed: dict[str, str] = field(default_factory=dict)
    """How the flags that were typed are spelled, by the same names."""

    @property
    def simulated(self) -> bool:
        """True if HETERO_VENDOR has this rank simulate another vendor."""
        return self.vendor != self.actual_vendor


def built_vendor() -> str:
    """The vendor that the running PyTorch is built for. Never initializes a GPU's driver."""
    return "amd" if torch.version.hip else ("nvidia" if torch.version.cuda else "cpu")


def running_vendor() -> str:
    """The vendor of the running PyTorch build and the accelerator it can see."""
    if torch.cuda.is_available():
        return "amd" if torch.version.hip else "nvidia"
    return "cpu"


def _named_vendor(
    value: str, *, local_rank: int, planned: str, local_size: int | None = None
) -> str:
    """The vendor that HETERO_VENDOR assigns to this rank.

    A single name applies to every rank of this launcher. A comma-separated list is by local rank,
    with `name*count` for repeated names. `plan` takes the vendor that the plan has for the rank.
    """
    if value == "plan":
        return planned
    names: list[str] = []
    for part in value.split(","):
        name, star, count = part.strip().partition("*")
        if name not in VENDORS or (star and not _COUNT.fullmatch(count)):
            raise UserError(
                f"{VENDOR_VARIABLE}={value!r} is not understood; use one of "
                f"{', '.join(VENDORS)}, or a list by local rank such as 'amd*2,nvidia*2', or 'plan'"
            )
        names += [name] * int(count or 1)
    if len(names) == 1:
        return names[0]
    if local_rank >= len(names) or local_size not in (None, len(names)):
        started = (
            f"local rank {local_rank} was" if local_size is None else f"{local_size} here were"
        )
        raise UserError(
            f"{VENDOR_VARIABLE}={value!r} names {counted(len(names), 'rank')} but {started} "
            "started; name one vendor for each local rank"
        )
    return names[local_rank]


def own_vendor(
    *,
    local_rank: int | None = None,
    planned: str = "cpu",
    environ: Mapping[str, str] = os.environ,
) -> str:
    """The vendor of the calling rank, or the one that HETERO_VENDOR has it simulate.

    Without `local_rank` and LOCAL_RANK, the global rank is taken for the local one.
    """
    override = environ.get(VENDOR_VARIABLE, "").strip().lower()
    if not override:
        return running_vendor()
    if local_rank is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        local_rank = int(environ.get("LOCAL_RANK", rank))
    size = environ.get("LOCAL_WORLD_SIZE", "")
    local_size = int(size) if size.isdecimal() else None
    return _named_vendor(override, local_rank=local_rank, local_size=local_size, planned=planned)


def identify(
    *,
    rank: int,
    local_rank: int,
    planned_vendor: str,
    flags: Mapping[str, Any],
    typed: Mapping[str, str] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> RankIdentity:
    """Describe the calling rank. `planned_vendor` is for HETERO_VENDOR=plan."""
    actual = running_vendor()
    vendor = own_vendor(local_rank=local_rank, planned=planned_vendor, environ=environ)
    device = platform.machine() + " CPU"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name(local_rank % torch.cuda.device_count())
    return RankIdentity(
        rank=rank,
        local_rank=local_rank,
        host=socket.gethostname(),
        vendor=vendor,
        actual_vendor=actual,
        device=device,
        project_version=f"{__version__}, {sources()}",
        torch_version=str(torch.__version__),
        core_version=core_version(),
        flags=dict(flags),
        typed=dict(typed or {}),
    )


@cache
def release_of(version: str) -> str:
    """The release of a PyTorch version: 2.11.0 for 2.11.0a0+git1a2b.nv25.8 and 2.11.0+rocm7."""
    try:
        return Version(version).base_version
    except InvalidVersion:  # a custom build
        return version.partition("+")[0]


def require_equal(
    hosts: Mapping[int, str],
    values: Sequence[str],
    *,
    what: str,
    remedy: str = "install the same on every node",
) -> None:
    """Refuse ranks, given with their hosts, that run different versions of something.

    Raises UserError. `values` are in the order of `hosts`.
    """
    by_value: dict[str, list[int]] = {}
    for rank, value in zip(hosts, values, strict=True):
        by_value.setdefault(value, []).append(rank)
    if len(by_value) > 1:
        sides = "; ".join(
            f"{ranks_on_hosts(same, hosts)}: {value}" for value, same in by_value.items()
        )
        raise UserError(f"the ranks run different {what}: {sides}; {remedy}")


def check_identities(
    identities: Sequence[RankIdentity],
    plan: Plan,
    *,
    mixed: bool,
) -> None:
    """Refuse a run whose ranks cannot train together or differ from the plan. Raises UserError.

    `mixed`: the run is on several vendors. Only releases of PyTorch are compared: suffixes
    (`a0+gitabc.nv25.8`, `+rocm7.1`) always differ by vendor.
    """
    hosts = {identity.rank: identity.host for identity in identities}
    require_equal(hosts, [i.project_version for i in identities], what="versions of this project")
    require_equal(hosts, [release_of(i.torch_version) for i in identities], what="PyTorch releases")
    require_equal(
        hosts,
        [i.core_version for i in identities],
        what="megatron-core versions",
        remedy=f"install the same on every node (Python 3.11 has {newest_core((3, 11))} only)",
    )
    _check_flags(identities)
    _check_vendors(identities, plan, mixed=mixed)


def _check_flags(identities: Sequence[RankIdentity]) -> None:
    """Refuse ranks with other values than rank 0's; each difference is told once, by its flag."""
    reference, faults = identities[0], Faults()
    told: set[str] = set()
    for identity in identities[1:]:
        # Where a plan file replaces flags on one side, the plans are compared, not the flags.
        common = reference.flags.keys() & identity.flags.keys()
        names = {name for name in common if reference.flags[name] != identity.flags[name]}
        # Other values follow from the flags that were typed, or from the plan.
        if followed := names & ({*reference.typed, *identity.typed} - {PLAN}) or names & {PLAN}:
            names = followed
        for name in sorted(names - told):
            told.add(name)
            faults.add([_difference(reference, identity, name)])
    faults.refuse()


def _difference(one: RankIdentity, other: RankIdentity, name: str) -> str:
    ends = f"rank {one.rank} on {one.host}", f"rank {other.rank} on {other.host}"
    if name == PLAN:
        plans = (one.flags[PLAN] or {}, other.flags[PLAN] or {})
        mine, theirs = (plan.get("meshes", []) for plan in plans)
        pairs = enumerate(zip(mine, theirs, strict=False))
        index = next((i for i, (one_s, other_s) in pairs if one_s != other_s), None)
        if index is None:
            what = [counted(len(meshes), "mesh", "meshes") for meshes in (mine, theirs)]
        else:
            what = [f"mesh {index} as {_brief(meshes[index])}" for meshes in (mine, theirs)]
        return (
            f"the plan of {ends[0]} has {what[0]} and that of {ends[1]} has {what[1]}; give every "
            "rank the same plan"
        )
    if name not in {*one.typed, *other.typed}:
        return (
            f"{ends[0]} has the {name} {_plain(one.flags[name])} and {ends[1]} "
            f"{_plain(other.flags[name])}; start every rank with the same flags and variables"
        )
    values = []
    for who in (one, other):
        flag, value = who.typed.get(name), who.flags[name]
        if flag is None:
            values.append(f"without {one.typed.get(name) or other.typed[name]}")
        else:
            values.append(f"with {flag}" + ("" if isinstance(value, bool) else f" {_plain(value)}"))
    return (
        f"{ends[0]} was started {values[0]} and {ends[1]} {values[1]}; start every rank with the "
        "same flags"
    )


def _plain(value: Any) -> str:
    """A flag's value as it is typed."""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _brief(mesh: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in mesh.items() if value is not None)


def _check_vendors(identities: Sequence[RankIdentity], plan: Plan, *, mixed: bool) -> None:
    if not mixed:
        vendors = sorted({i.vendor for i in identities})
        if len(vendors) > 1:
            raise UserError(
                f"the ranks belong to {' and '.join(vendors)} but the run is homogeneous; vendor "
                "libraries cannot talk to each other: use --hetero-pipeline or "
                "--hetero-data-parallel"
            )
        return
    for identity in identities:
        planned = plan.vendor_of_rank(identity.rank)
        if identity.vendor != planned:
            place = plan.coordinate(identity.rank)
            what = f"replica {place.data}" if plan.whole_replicas else f"stage {place.stage}"
            raise UserError(
                f"rank {identity.rank} on {identity.host} is {identity.vendor} but the plan "
                f"puts {what} on {planned}; start it on the other node, change the "
                f"plan, or set {VENDOR_VARIABLE} to simulate"
            )
