"""One rank of the programs that `hetero verify` starts: links, their speed, rails and operators.

    python -m hetero.run ... -m hetero.tools.verification.rank links --pair 0 1 --out FILE

Two ranks of different vendors check together; what one of them found is written by itself.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hetero
from hetero.device.choose_device import choose_device
from hetero.errors import ExchangeError, UnavailableTransport, first_line
from hetero.link import PATHS
from hetero.link.base import Link
from hetero.link.nics import find_nics
from hetero.link.open import ChannelOptions
from hetero.startup.addresses import address_towards, reachable_address
from hetero.startup.exchange import Exchange
from hetero.startup.store import host_of
from hetero.text import integer
from hetero.tools.benchmark.collective import OPERATIONS
from hetero.tools.benchmark.limits import bare_copies, limit_of, open_sockets, rate, sockets_name
from hetero.tools.benchmark.link import LinkMeter, LinkPath, Messages
from hetero.tools.benchmark.link import Path as MeasuredPath
from hetero.tools.benchmark.program import run_rank
from hetero.tools.benchmark.ranks import Ranks
from hetero.tools.benchmark.record import MIB, CollectiveOptions, Options
from hetero.tools.reports.page import write_whole
from hetero.tools.tool_command_line import Parser, run
from hetero.tools.verification.contract import CONTRACT, SHORT, Side, make

CHECKED_SUMS = ("shm", "verbs-host", "tcp")
"""Paths whose every byte a CPU sees, and so may be given checksums."""
_TIMEOUT = 20.0
_SECONDS_TO_AGREE = 120.0
_RING_BYTES, _CHUNK_BYTES = 2 << 20, 64 << 10
"""Small, so that even small messages are cut and every ring wraps."""
_SPEED_SIZES = 4 << 10, 16 << 20
_CONNECTIONS = 4
_SPEED = Options(seconds_a_point=2.0, repeats=50)
_RAIL_MESSAGES, _RAIL_BYTES, _CUT_AT = 48, 1 << 20, 12


@dataclass(frozen=True)
class End:
    """One of the two ranks that check together."""

    rank: int
    peer: int
    store: dist.Store
    pair: Ranks
    nics: tuple[str, ...]
    device: torch.device

    def store_of(self, name: str) -> dist.Store:
        return dist.PrefixStore(name, self.store)

    def connect(
        self,
        name: str,
        transport: str,
        *,
        device: torch.device,
        timeout: float = _TIMEOUT,
        options: ChannelOptions | None = None,
    ) -> Link:
        return hetero.connect(
            self.store_of(name),
            rank=self.rank,
            peer=self.peer,
            device=device,
            transport=transport,
            timeout=timeout,
            nics=list(self.nics),
            options=options,
        )


# Links.


def check_links(end: End) -> dict[str, Any]:
    """Every clause of the contract over every path that is there, in both directions."""
    devices = dict.fromkeys([end.device, torch.device("cpu")])
    found: dict[str, Any] = {"absent": {}, "clauses": []}
    for device in devices:
        kind = "GPU" if device.type == "cuda" else "CPU"
        for path in PATHS:
            for checksum in (False, True) if path in CHECKED_SUMS else (False,):
                way = f"{path}{', checksums' if checksum else ''}, {kind} tensors"
                options = ChannelOptions(_RING_BYTES, _CHUNK_BYTES, checksum)
                absent, broken = _why_not(end, way, path, device, options)
                if absent:
                    found["absent"][way] = absent
                elif broken:
                    found["clauses"].append([way, "opening", None, [broken]])
                else:
                    found["clauses"] += _play(end, way, path, device, options)
    return found


def _why_not(
    end: End, way: str, path: str, device: torch.device, options: ChannelOptions
) -> tuple[str, str]:
    """Why a path is not there, and why one that should be does not open; empty where it does."""
    absent = broken = ""
    try:
        end.connect(f"try/{way}", path, device=device, options=options).close()
    except UnavailableTransport as error:
        reason = str(error).partition(f"cannot use {path}: ")[2].rpartition("; ")[0]
        absent = reason or str(error)
    except Exception as error:  # whatever it is, it is what is to be reported
        broken = first_line(error) or type(error).__name__
    said = end.pair.together(lambda: (absent, broken))
    return said[0][0] or said[1][0], said[0][1] or said[1][1]


def _play(
    end: End, way: str, path: str, device: torch.device, options: ChannelOptions
) -> Iterator[list[Any]]:
    """Each clause, with what both ends say is wrong, over links of its own."""
    for name, rule in CONTRACT.items():
        for sender in (0, 1):
            place = f"{way}/{name}/{sender}"
            timeout = SHORT if rule.fails else _TIMEOUT
            side = Side(
                rank=end.rank,
                peer=end.peer,
                store=end.store_of(f"words/{place}"),
                device=device,
                opener=lambda timeout, place=place: end.connect(  # type: ignore[misc]
                    place, path, device=device, timeout=timeout, options=options
                ),
                sends=end.pair.rank == sender,
                timeout=timeout,
                options={"count": 500},
            )
            said = end.pair.together(lambda side=side, rule=rule: _kept(side, rule.clause))  # type: ignore[misc]
            side.close()
            yield [way, name, sender, [*said[0], *said[1]]]


def _kept(side: Side, clause: Callable[[Side], list[str]]) -> list[str]:
    try:
        side.open()
        return clause(side)
    except Exception as error:  # a clause that raises is not kept
        return [first_line(error) or type(error).__name__]


# Speed.


def measure_speed(end: End) -> dict[str, Any]:
    """What every path that is there reaches, and the share of the bare path that bounds it."""
    meter = LinkMeter(end.pair, _SPEED)
    limits = _limits(end, meter)
    paths: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name in ("auto", *PATHS):
        options = ChannelOptions()
        absent, broken = _why_not(end, f"speed {name}", name, end.device, options)
        if broken:
            failed[name] = broken
        if absent or broken:
            continue
        with end.connect(f"speed/{name}", name, device=end.device) as link:
            try:
                reached = _rates(end, meter, LinkPath(name, link, end.device))
            except ExchangeError as failure:
                failed[name] = str(failure)
                continue
            on_gpu = end.device.type == "cuda"
            limit = limit_of(link.transport, on_gpu=on_gpu, connections=_CONNECTIONS)
            bound = limits.get(limit or "")
            paths[name] = reached | {
                "transport": link.transport,
                "limit": limit if bound else None,
                "share": reached["gb_s"] / bound if bound else None,
            }
    return {"paths": paths, "limits": limits, "failed": failed}


def _rates(end: End, meter: LinkMeter, path: MeasuredPath) -> dict[str, float]:
    small, large = (
        Messages.of(nbytes, rank=end.pair.rank, device=path.device) for nbytes in _SPEED_SIZES
    )
    meter.check(path, large)
    found = meter.rates(path, small, large)
    return {
        "latency_us": found["latency_us"],
        "gb_s": min(found["there_gb_s"], found["back_gb_s"]),
        "both_gb_s": found["both_gb_s"],
    }


def _limits(end: End, meter: LinkMeter) -> dict[str, float]:
    """GB/s of what bounds the paths: sockets between the two, and copies within this host."""
    name = sockets_name(_CONNECTIONS)
    own = address_towards(host_of(end.store))
    said = end.pair.together(lambda: own)
    address = reachable_address(own, [said[1] if end.pair.leads else said[0]])
    address = find_nics(list(end.nics), own=address).addresses[0]
    at = end.pair.together(lambda: address)[0]
    sockets = open_sockets(
        name,
        rank=end.pair.rank,
        connections=_CONNECTIONS,
        store=end.store_of("sockets"),
        timeout=_TIMEOUT,
        address=at,
    )
    limits = {name: _rates(end, meter, sockets)["gb_s"]}
    sockets.close()
    source = torch.ones(16 * MIB, dtype=torch.uint8, device=end.device)
    for copy in bare_copies(source) if _has_peer(end.device) else []:
        reached = end.pair.together(lambda copy=copy: rate(copy, 0.2) if end.pair.leads else 0.0)  # type: ignore[misc]
        limits[copy.name] = reached[0]
    return limits


def _has_peer(device: torch.device) -> bool:
    return device.type == "cpu" or torch.cuda.device_count() > 1


def measure_collectives(store: dist.Store, rank: int, size: int, device: str) -> dict[str, Any]:
    options = CollectiveOptions(
        backends=("gloo", "hetero"),
        device=device,
        seconds_a_point=0.1,
        timeout=60.0,
        sizes=(64 << 10, 4 << 20),
        operations=OPERATIONS,
    )
    return run_rank(rank, size, store, options=options, command=[]).as_mapping()


# A rail.


class _Words(logging.Handler):
    """What the links' watches say, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append((time.monotonic(), record.getMessage()))


def lose_a_rail(end: End) -> dict[str, Any]:
    """Messages both ways over several rails, of which the first end cuts one on the way."""
    words = _Words()
    logger = logging.getLogger("hetero.link.carrier")
    logger.addHandler(words)
    logger.propagate = False
    rails = max(2, 2 * len(end.nics))
    options = ChannelOptions(ring_bytes=8 << 20, chunk_bytes=64 << 10, connections=rails)
    changed, cut_at = 0, 0.0
    with end.connect("rails", "tcp", device=torch.device("cpu"), options=options) as link:
        for number in range(_RAIL_MESSAGES):
            if number == _CUT_AT:
                cut_at = time.monotonic()
                if end.pair.leads and link.cut_rail is not None:
                    link.cut_rail(rails - 1)
            changed += _exchange_over(link, end, number)
        link.check()
    lost = [(when, text) for when, text in words.said if " is lost: " in text]
    return {
        "rails": rails,
        "changed": changed,
        "lost": [text for _, text in lost],
        # The other end may hear of it before it is as far itself.
        "seconds": max(0.0, lost[0][0] - cut_at) if lost else None,
    }


def _exchange_over(link: Link, end: End, number: int) -> int:
    """Four messages each way at once; how many arrived changed."""
    cpu = torch.device("cpu")
    works, pairs = [], []
    for part in range(4):
        seed = 8 * number + 2 * part
        sent = make((_RAIL_BYTES,), torch.uint8, cpu, seed=seed + end.pair.rank)
        expected = make((_RAIL_BYTES,), torch.uint8, cpu, seed=seed + 1 - end.pair.rank)
        target = torch.zeros_like(expected)
        works += [link.send(sent), link.recv(target)]
        pairs.append((target, expected))
    for work in works:
        work.wait()
    return sum(not torch.equal(target, expected) for target, expected in pairs)


# Operators.


def check_operators(dtypes: Sequence[str], flags: Sequence[str]) -> dict[str, Any]:
    """Every operator of a layer on this device beside float64 on its CPU, in each dtype."""
    from megatron.hetero.import_core import import_megatron_core

    import_megatron_core()
    from hetero.tools.operators.comparison import compare, verdict
    from hetero.tools.operators.dump import REFERENCE
    from hetero.tools.operators.layer_flags import layer_arguments
    from hetero.tools.operators.recording import default_device, record

    found: dict[str, Any] = {}
    for dtype in dtypes:
        args = layer_arguments(flags, dtype=dtype, layers=1)
        ours, exact = (record(args, device=d, sample=0) for d in (default_device(), REFERENCE))
        comparison = compare(ours, exact)
        operators: dict[str, bool] = {}
        for row in comparison.isolated:
            operators[row.operator] = operators.get(row.operator, True) and row.difference.passed
        worst = max(
            row.difference.error / row.difference.limits.error for row in comparison.isolated
        )
        found[dtype] = {"operators": operators, "verdict": verdict(comparison), "worst": worst}
    return found


# The process.


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)

    def work() -> str:
        found = _found(options)
        if found is not None:
            # On one node both ends may write.
            number = found.get("end", 0)
            out = options.out.with_stem(f"{options.out.stem}{number or ''}")
            write_whole(out, json.dumps(found) + "\n")
        return ""

    return run(work)


def _found(options: argparse.Namespace) -> dict[str, Any] | None:
    """What this rank found; None in one that only has to be there."""
    if options.what == "operators":
        return check_operators(options.dtypes, options.flags)
    store, rank, size = next(iter(dist.rendezvous("env://")))
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = choose_device(local_rank, local_size)
    found: dict[str, Any] | None = None
    if rank in options.pair:
        number = options.pair.index(rank)
        words = Ranks(number, 2, dist.PrefixStore("verify/words", store), timeout=_SECONDS_TO_AGREE)
        end = End(
            rank=rank,
            peer=options.pair[1 - number],
            store=dist.PrefixStore("verify/links", store),
            pair=words,
            nics=tuple(options.nics),
            device=device,
        )
        checks = {"links": check_links, "speed": measure_speed, "rail": lose_a_rail}
        found = checks[options.what](end) | {"end": number}
    if options.what == "speed":
        apart = dist.PrefixStore("verify/collectives", store)
        record = measure_collectives(apart, rank, size, device.type)
        found = None if found is None else found | {"collectives": record}
    ends = Exchange(store, "ends", member=rank, size=size, key="verify/ends")
    ends.submit()
    if rank == 0:  # it may host the store
        ends.wait(store.timeout.total_seconds())
    has_word = found is not None and (found["end"] == 0 or options.what == "rail")
    return found if has_word else None


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("links", "speed", "rail", "operators"), help="the check")
    parser.add_argument("--pair", nargs=2, type=integer(0), default=[0, 1], help="ranks that check")
    parser.add_argument("--nics", nargs="*", default=[], help="this node's NICs for links")
    parser.add_argument("--dtypes", nargs="+", default=["bf16"], help="of operators")
    parser.add_argument("--out", type=Path, required=True, help="file for what was found")
    options, flags = parser.parse_with_run_flags(argv)
    options.flags = flags
    return options


if __name__ == "__main__":
    sys.exit(main())
