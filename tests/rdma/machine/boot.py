"""Boots Debian's own kernel under QEMU's software emulation and tests RDMA inside it.

The emulated machine has four Soft-RoCE devices, which play the NICs of two hosts with two rails
each (guest/network.sh). It sees this machine's files, read-only under a layer in memory, so that it
runs this checkout with this checkout's Python. What it leaves comes back in a folder.

    python -m tests.rdma.machine.boot                    the suite (guest/suite.sh)
    python -m tests.rdma.machine.boot -- COMMAND ...     any command, in the checkout's root

Exit code 0 when all passed or, with a line that says so, when this machine cannot run it;
1 otherwise. Nothing outside the cache, the output folder and Debian's packages is touched.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn
from xml.etree import ElementTree

from hetero.errors import LinkError
from hetero.native.binding import native
from tests.rdma.machine import image, packages

ROOT = Path(__file__).resolve().parents[3]
GUEST = Path(__file__).parent / "guest"
CACHE = ROOT / ".cache" / "rdma"
OUT_IN_GUEST = Path("/run/out")

RAILS = "rxa0,rxa1/rxb0,rxb1"
"""The RDMA devices of the two ends of a link, as the tests read them."""
SLOWNESS = 20
"""How many times slower than a real machine's the emulated one's processors are, about."""
PROCESSORS = 2
MEMORY_MIB = 4096
SHOWN_AT_END = 30


class GuestFailed(Exception):
    """The emulated machine did not end well, or a test in it failed; the text is one sentence."""


class GuestTooSlow(GuestFailed):
    """The time was over before the tests were, and none of those that ended had failed."""


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, _end_at_once)
    try:
        packages.require_debian()
        _require_python()
        packages.install()
        booted = image.prepare(CACHE)
    except packages.CannotRun as reason:
        print(f"test-rdma: SKIPPED, nothing of RDMA was tested: {reason}", flush=True)
        return 0
    out = Path(options.out).resolve()
    command = options.command or ["bash", str(GUEST / "suite.sh")]
    try:
        _build_native()
        run(booted, command, out=out, seconds=60 * options.minutes)
        if not options.command:
            _require_passed(out)
    except GuestTooSlow as late:
        if options.allow_slow:
            print(f"test-rdma: NOT FINISHED, the rest was not tested: {late}", flush=True)
            return 0
        print(f"test-rdma: FAILED: {late}", file=sys.stderr, flush=True)
        return 1
    except GuestFailed as failure:
        print(f"test-rdma: FAILED: {failure}", file=sys.stderr, flush=True)
        return 1
    print(f"test-rdma: passed, on emulated devices; see {out}", flush=True)
    return 0


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", default=str(ROOT / "runs" / "rdma"), help="what comes back")
    parser.add_argument("--minutes", type=float, default=10, help="the machine ends after these")
    parser.add_argument(
        "--allow-slow",
        action="store_true",
        help="tests that this machine was too slow to reach are a line, not a failure",
    )
    given = list(argv)
    cut = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:cut])
    options.command = given[cut + 1 :]
    return options


def run(booted: image.Image, command: Sequence[str], *, out: Path, seconds: float) -> None:
    """Boot, run one command in the checkout's root, and stream what the machine prints.

    Raises GuestFailed when the command fails and when the machine dies or is not done in time.
    """
    out.mkdir(parents=True, exist_ok=True)
    for old in [*out.glob("*.xml"), *out.glob("*.json"), out / "exit_status"]:
        old.unlink(missing_ok=True)
    (out / "guest.sh").write_text(_guest_script(command))
    began = time.monotonic()
    process = subprocess.Popen(
        _qemu(booted, out),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    last: deque[str] = deque(maxlen=SHOWN_AT_END)
    reader = threading.Thread(target=_stream, args=(process, out / "console.log", last))
    reader.start()
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        reader.join()
        text = (out / "console.log").read_text()
        passed, failed = text.count(" PASSED"), text.count(" FAILED") + text.count(" ERROR")
        kind = GuestTooSlow if passed and not failed else GuestFailed
        raise kind(
            f"the emulated machine was not done after {seconds:.0f} s ({passed} tests passed, "
            f"{failed} failed); its last lines:\n" + "\n".join(last)
        ) from None
    finally:
        process.kill()
        process.wait()
        reader.join()
    print(f"test-rdma: the emulated machine ran for {time.monotonic() - began:.0f} s", flush=True)
    status = (out / "exit_status").read_text().strip() if (out / "exit_status").exists() else ""
    if not status:
        raise GuestFailed(
            f"the emulated machine died (QEMU's exit code {process.returncode}); its last lines:\n"
            + "\n".join(last)
        )
    if status != "0":
        raise GuestFailed(f"the command in the emulated machine ended with exit code {status}")


def _guest_script(command: Sequence[str]) -> str:
    """What the machine runs once its root is there; it writes how the command ended, and ends."""
    environ = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "PYTHON": sys.executable,
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "HETERO_TEST_RAILS": RAILS,
        "HETERO_TEST_SLOWNESS": str(SLOWNESS),
        "HETERO_TEST_OUT": str(OUT_IN_GUEST),
    }
    lines = [f"export {name}={shlex.quote(value)}" for name, value in environ.items()]
    lines += [
        "hostname localhost",
        f"cd {shlex.quote(str(ROOT))}",
        f"bash {shlex.quote(str(GUEST / 'network.sh'))} && {shlex.join(command)}",
        f"echo $? > {OUT_IN_GUEST}/exit_status",
        "sync",
        "echo o > /proc/sysrq-trigger",
        # Returning would end the first process: a panic before the machine is off.
        "while :; do :; done",
    ]
    return "\n".join(lines) + "\n"


def _qemu(booted: image.Image, out: Path) -> list[str]:
    kernel_flags = (
        "console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off nokaslr tsc=reliable "
        "random.trust_cpu=on"
    )
    return [
        *("qemu-system-x86_64", "-nodefaults", "-no-user-config", "-no-reboot"),
        *("-display", "none", "-monitor", "none", "-serial", "stdio"),
        # Where a processor promises fast `rep movsb`, Linux copies with it, which is slow emulated.
        *("-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max,-erms,-fsrm"),
        *("-smp", str(PROCESSORS), "-m", str(MEMORY_MIB)),
        *("-kernel", str(booted.kernel), "-initrd", str(booted.initrd), "-append", kernel_flags),
        *_folder(Path("/"), "host", "readonly=on,multidevs=remap"),
        *_folder(out, "out", "readonly=off"),
    ]


def _folder(path: Path, tag: str, how: str) -> list[str]:
    """A folder of this machine that the emulated one can mount under the name `tag`."""
    # QEMU reads a doubled comma as one that is part of the value.
    escaped = str(path).replace(",", ",,")
    return [
        *("-fsdev", f"local,id={tag},path={escaped},security_model=none,{how}"),
        *("-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"),
    ]


def _stream(process: subprocess.Popen[str], log: Path, last: deque[str]) -> None:
    """Print what the machine prints, line by line, after how many seconds, and keep it."""
    assert process.stdout is not None
    began = time.monotonic()
    with log.open("w") as kept:
        for line in process.stdout:
            text = f"{time.monotonic() - began:4.0f} | {line.rstrip()}"
            last.append(text)
            print(text, file=kept, flush=True)
            print(text, flush=True)


def _build_native() -> None:
    """Build the library in C in this checkout, where the emulated machine finds it."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    outcome = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    try:
        native()
    except LinkError as error:
        said = outcome.stdout + outcome.stderr
        raise GuestFailed(f"hetero/native cannot be built: {error}\n{said}") from error


def _require_passed(out: Path) -> None:
    """Say how the suite went. One in which nothing passed has tested nothing."""
    cases = list(ElementTree.parse(out / "rdma.xml").iter("testcase"))
    left_out = Counter(str(skip.get("message")) for case in cases for skip in case.iter("skipped"))
    passed = len(cases) - left_out.total()
    seconds = sum(float(case.get("time", 0)) for case in cases)
    print(f"test-rdma: {passed} passed, {left_out.total()} skipped in {seconds:.0f} s")
    for reason, count in left_out.items():
        print(f"test-rdma: {count} skipped: {reason}")
    if passed == 0:
        raise GuestFailed("no test passed in the emulated machine")


def _require_python() -> None:
    """Debian's pyverbs is an extension for one release of Python."""
    if sys.version_info[:2] != (3, 11):
        have = ".".join(map(str, sys.version_info[:2]))
        raise packages.CannotRun(f"Debian's pyverbs is built for Python 3.11, this is {have}")


def _end_at_once(signum: int, frame: object) -> NoReturn:
    """Let the emulated machine be ended with this program."""
    sys.exit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
