"""The rendezvous store, the launcher's environment, and the addresses of ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from hetero.errors import UserError
from hetero.startup.addresses import (
    reachable_address,
    set_gloo_interface,
    unusable_gloo_interfaces,
)
from hetero.startup.liveness import LocalRanks
from hetero.startup.process import allow_open_files
from hetero.text import counted

if TYPE_CHECKING:
    import torch.distributed as dist

    from hetero.startup.exchange import JobExchanges
    from hetero.startup.liveness import Liveness


def environment_rank() -> tuple[int, int, int]:
    """(rank, world size, local rank) from torchrun's environment; (0, 1, 0) without a launcher.

    Raises UserError.
    """
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    texts = {name: os.environ.get(name, default) for name, default in defaults.items()}
    if wrong := [f"{name}={text!r}" for name, text in texts.items() if not text.isdecimal()]:
        raise UserError(
            f"the environment has {', '.join(wrong)}, which must be whole numbers; start this "
            "program with python -m hetero.run or torchrun"
        )
    rank, world_size, local_rank = map(int, texts.values())
    if rank >= world_size:
        raise UserError(
            f"RANK={rank} is not below WORLD_SIZE={world_size}; start this program with torchrun"
        )
    return rank, world_size, local_rank


def store_endpoint() -> str:
    """The address of the store, as people write it."""
    return f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"


def open_store(
    rank: int, world_size: int, timeout: float, local_ranks: LocalRanks | None = None
) -> dist.Store:
    """Connect to the TCPStore that the environment names; rank 0 hosts it without torchrun.

    Does not wait for other ranks: `JobExchanges` does, and names those that are missing.
    """
    import torch.distributed as dist

    if "MASTER_ADDR" not in os.environ:
        if world_size > 1:
            raise UserError(
                "MASTER_ADDR is not set; start several processes with python -m hetero.run"
            )
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    host, port_text = os.environ["MASTER_ADDR"], os.environ.get("MASTER_PORT", "")
    if not port_text.isdecimal() or int(port_text) > 65535:
        raise UserError(f"MASTER_PORT must be a port number, not {port_text!r}")
    port = int(port_text)
    # torchrun's own agent hosts the store, for every rank.
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_host = rank == 0 and not hosted
    allow_open_files()
    if not is_host:
        _await_listener(host, port, rank, timeout, local_ranks)
    try:
        store: dist.Store = dist.TCPStore(
            host,
            port,
            world_size,
            is_host,
            timedelta(seconds=timeout),
            wait_for_workers=False,
        )
    except Exception as error:
        remedy = "another program uses the port: choose another --master-port"
        reason = remedy if is_host else "see that it can be reached from here"
        raise UserError(f"rank {rank} could not open {host}:{port}; {reason}") from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    of_job = dist.PrefixStore(f"hetero/attempt {attempt}", store)
    _require_world_size(of_job, world_size)
    return of_job


def _require_world_size(store: dist.Store, world_size: int) -> None:
    """Raise UserError in a rank of another job, before it takes part in anything of this one."""
    found = store.compare_set("hetero/world size", "", str(world_size)).decode()
    if found != str(world_size):
        raise UserError(
            f"the job at {store_endpoint()} has {counted(int(found), 'rank')}, and this process is "
            f"one of {world_size}; if that is another job, choose another --master-port, else give "
            "all ranks the same WORLD_SIZE"
        )


def agree_on_addresses(exchanges: JobExchanges, liveness: Liveness) -> str:
    """The local address through which other hosts reach this rank. Collective.

    Also makes gloo use its interface, unless GLOO_SOCKET_IFNAME is set.
    """
    error = None
    try:
        liveness.await_connection()
    except UserError as failure:
        error = failure
    payload = {
        "address": liveness.address,
        "is elsewhere": liveness.is_elsewhere,
        "gloo": [unusable_gloo_interfaces(several_hosts=several) for several in (False, True)],
    }
    payloads = exchanges.exchange("addresses", payload=payload, error=error, joining=True)
    several_hosts = any(payload["is elsewhere"] for payload in payloads)
    _check_gloo_interfaces([payload["gloo"][several_hosts] for payload in payloads], liveness)
    own = reachable_address(liveness.address, [payload["address"] for payload in payloads])
    set_gloo_interface(own)
    return own


def _check_gloo_interfaces(unusable: Sequence[Sequence[str]], liveness: Liveness) -> None:
    """All ranks check the same, by rank, and raise the same: gloo's own error says too little."""
    found = [
        f"{', '.join(names)} on {liveness.name([rank])}"
        for rank, names in enumerate(unusable)
        if names
    ]
    if found:
        raise UserError(
            f"GLOO_SOCKET_IFNAME names {'; '.join(found)}: no interface there by which other ranks "
            "could reach it; name one that leads to them, or leave the variable unset",
            known_to_all=True,
        )


def _await_listener(
    host: str, port: int, rank: int, timeout: float, local_ranks: LocalRanks | None
) -> None:
    """Wait for rank 0. Raises UserError, or ExchangeError if it has ended on this host."""
    # Imports torch, which a refusal of flags does without.
    from hetero.startup.store import await_listener

    def who(error: OSError) -> str | None:
        # One rank per node logs.
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return None
        return f"rank 0 at {host}:{port} ({error.strerror or error}; this is rank {rank})"

    def check_abort() -> None:
        if local_ranks is not None:
            local_ranks.require_alive([0])

    try:
        await_listener(host, port, seconds=timeout, who=who, check_abort=check_abort)
    except OSError as error:
        raise UserError(
            f"nobody listens at {host}:{port}, where rank {rank} was told to meet the others "
            f"({error.strerror or error}), for {timeout:.0f} s; see that rank 0 was started and "
            "that this address can be reached from here"
        ) from error
