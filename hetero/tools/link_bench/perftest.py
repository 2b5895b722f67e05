"""`ib_write_bw` of the perftest package: what an RDMA device does without us."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero.device.topology import SYS
from hetero.errors import HeteroError
from hetero.tools.launching.interrupts import answered_afterwards
from hetero.tools.link_bench.bench_record import RDMA_WRITE, Point

PROGRAM = "ib_write_bw"
_SECONDS = 20.0
_TRIES = 20
# perftest takes no fewer than 5 iterations.
_LEAST_ITERATIONS, _MOST_ITERATIONS = 5, 1000
_BYTES = 256 << 20
_IPV4_PREFIX = "0000:0000:0000:0000:0000:ffff:"
_ROW = re.compile(r"^\s*(\d+)\s+(\d+)\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)", re.MULTILINE)


@dataclass(frozen=True)
class PerftestRun:
    """One device writing to itself or to a second one of this host."""

    devices: tuple[str, str]
    """Of the server and of the client."""
    port: int = 18515
    seconds: float = _SECONDS
    sys_root: Path = SYS

    def rate(self, nbytes: int, *, both: bool) -> float:
        """10^9 bytes a second on average; with `both`, of the two directions together."""
        server = None
        try:
            with answered_afterwards(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                server = subprocess.Popen(
                    self._command(self.devices[0], nbytes, both),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            return parse_rate(self._client(server, nbytes, both), nbytes)
        finally:
            if server is not None:
                server.kill()
                server.communicate()

    def _client(self, server: subprocess.Popen[str], nbytes: int, both: bool) -> str:
        command = [*self._command(self.devices[1], nbytes, both), "127.0.0.1"]
        said = ""
        for _ in range(_TRIES):
            try:
                ended = subprocess.run(
                    command, capture_output=True, text=True, timeout=self.seconds, check=False
                )
            except subprocess.TimeoutExpired as error:
                raise HeteroError(f"{PROGRAM} did not end within {self.seconds:g} s") from error
            if ended.returncode == 0:
                return ended.stdout
            said = ended.stdout + ended.stderr
            with contextlib.suppress(subprocess.TimeoutExpired):
                out, _ = server.communicate(timeout=0.25)
                raise HeteroError(_last_line(out))
            # The server still listens: the client may have come too early.
        raise HeteroError(_last_line(said))

    def _command(self, device: str, nbytes: int, both: bool) -> list[str]:
        count = min(max(_BYTES // nbytes, _LEAST_ITERATIONS), _MOST_ITERATIONS)
        flags = ["-d", device, "-s", str(nbytes), "-p", str(self.port), "-F", "--report_gbits"]
        flags += ["-n", str(count)]
        index = gid_index(device, sys_root=self.sys_root)
        if index is not None:
            flags += ["-x", str(index)]
        return [PROGRAM, *flags, *(["-b"] if both else [])]


def gid_index(device: str, *, sys_root: Path) -> int | None:
    """The GID of RoCE v2 with an IPv4 address; None on InfiniBand, which needs none.

    perftest would take the first, which is RoCE v1 or of another subnet on many devices.
    """
    port = sys_root / "class/infiniband" / device / "ports/1"
    for entry in sorted(port.glob("gids/*"), key=lambda gid: int(gid.name)):
        try:
            kind = (port / "gid_attrs/types" / entry.name).read_text().strip()
            gid = entry.read_text().strip()
        except OSError:  # an index without a GID
            continue
        if kind == "RoCE v2" and gid.startswith(_IPV4_PREFIX):
            return int(entry.name)
    return None


def parse_rate(output: str, nbytes: int) -> float:
    """The average of the row of a size, from gigabits to 10^9 bytes a second."""
    for size, _, _, average, _ in _ROW.findall(output):
        if int(size) == nbytes:
            return float(average) / 8
    raise HeteroError(_last_line(output))


def unavailable_reason(devices: Sequence[str]) -> str | None:
    """Why there is nothing to run on this host; None where there is."""
    if not devices:
        return f"{PROGRAM}: this host has no RDMA device"
    if shutil.which(PROGRAM) is None:
        return f"{PROGRAM}: not installed (the perftest package has it)"
    return None


def measure_write(run: PerftestRun, nbytes: int) -> Point:
    """One size, one direction and both. Raises HeteroError."""
    return Point(
        path=RDMA_WRITE,
        is_limit=True,
        nbytes=nbytes,
        bandwidth_gb_s=run.rate(nbytes, both=False),
        both_gb_s=run.rate(nbytes, both=True),
    )


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip(" \n-")]
    return f"{PROGRAM} failed: {lines[-1]}" if lines else f"{PROGRAM} failed without a word"
