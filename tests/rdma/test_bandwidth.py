"""What a link makes of a NIC, beside what `ib_write_bw` makes of it on the same emulated devices.

The ratio is written for people to read. Software that plays a NIC moves bytes with this machine's
processors, so that nothing is asserted of it and its absolute numbers mean nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections import deque
from pathlib import Path

import pytest
import torch

from hetero.link.base import Work
from hetero.tools.verification.contract import make, same_bits
from tests.forked_ranks import values
from tests.hetero.link.contract import Pair, Side
from tests.hetero.link.transports import SLOWNESS
from tests.rdma.links import verbs_over
from tests.rdma.rails import Rail

MESSAGE = 4 << 20
MESSAGES = 10
WARM_UP = 3
WINDOW = 4
ROUNDS = 3
TARGET = 0.95
MIB = 1 << 20


def measured(side: Side) -> list[float]:
    """Bytes per second that rank 1 receives from rank 0, of each round; its clock counts."""
    sent = make((MESSAGE,), torch.uint8, side.device, seed=1)
    target = torch.zeros_like(sent)

    def move(count: int) -> None:
        flights: deque[Work] = deque()
        for _ in range(count):
            flights.append(side.link.send(sent) if side.rank == 0 else side.link.recv(target))
            if len(flights) > WINDOW:
                flights.popleft().wait()
        while flights:
            flights.popleft().wait()

    rates = []
    move(WARM_UP)
    for number in range(ROUNDS):
        target.zero_()
        if side.rank == 0:
            side.hear(f"go {number}")
            move(MESSAGES)
            continue
        began = time.perf_counter()
        side.say(f"go {number}")
        move(MESSAGES)
        rates.append(MESSAGES * MESSAGE / (time.perf_counter() - began))
        assert same_bits(target, sent)
    return rates


def ib_write_bw(rail: Rail, *, port: int) -> float:
    """Bytes per second of rdma-core's own measure, writing without any protocol around it."""

    def command(rank: int, *more: str) -> list[str]:
        sizes = ["-s", str(MESSAGE), "-n", str(MESSAGES), "-t", str(WINDOW)]
        device = ["-d", rail.devices[rank], "-x", str(rail.gid_index(rank)), "-p", str(port)]
        return ["ib_write_bw", "-F", *device, *sizes, *more]

    server = subprocess.Popen(
        command(1), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        deadline = time.monotonic() + 5.0 * SLOWNESS
        while True:
            client = subprocess.run(
                command(0, "127.0.0.1"),
                capture_output=True,
                text=True,
                timeout=5.0 * SLOWNESS,
                check=False,
            )
            if client.returncode == 0:
                break
            # The server may not listen yet.
            assert time.monotonic() < deadline, client.stdout + client.stderr
            time.sleep(0.2)
        server.communicate(timeout=5.0 * SLOWNESS)
    finally:
        server.kill()
        server.wait()
    (row,) = (line for line in client.stdout.splitlines() if line.split()[:1] == [str(MESSAGE)])
    return float(row.split()[3]) * MIB


def test_bandwidth_beside_ib_write_bw(pair: Pair, rails: list[Rail]) -> None:
    rail = rails[0]
    # Before and after: this machine's processors are seldom as free at one time as at another.
    reference = [ib_write_bw(rail, port=18515)]
    # The shape of a link's rings where nothing else is asked for: 64 MiB, both ways together.
    transport = verbs_over([rail], ring_bytes=32 << 20, chunk_bytes=2 << 20)
    _, ours = values(pair.run(measured, transport=transport))
    reference.append(ib_write_bw(rail, port=18516))
    ratio = statistics.median(ours) / statistics.median(reference)
    record = {
        "emulated": True,
        "device": rail.devices[0],
        "message_bytes": MESSAGE,
        "link_mib_s": [rate / MIB for rate in ours],
        "ib_write_bw_mib_s": [rate / MIB for rate in reference],
        "ratio": ratio,
        "target": TARGET,
    }
    out = Path(os.environ["HETERO_TEST_OUT"]) / "bandwidth.json"
    out.write_text(json.dumps(record, indent=1) + "\n")
    print(
        f"{MESSAGE // MIB} MiB messages over an emulated NIC: the link moves {ratio:.2f} of what "
        f"ib_write_bw moves (target {TARGET})"
    )
    assert json.loads(out.read_text())["ratio"] == pytest.approx(ratio)
