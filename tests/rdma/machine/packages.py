"""Gets Debian's own packages: what runs the emulated machine, and the kernel that it boots.

python -m tests.rdma.machine.packages      installs the first, and what shows the live view, or
                                           says why it cannot
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

NEEDED = (
    "busybox-static",
    "cpio",
    "gcc",
    "ibverbs-providers",
    "ibverbs-utils",
    "iproute2",
    "kmod",
    "libc6-dev",
    "libibverbs-dev",
    "perftest",
    "python3-pyverbs",
    "qemu-system-x86",
    "rdma-core",
)
LOOKS = ("chromium", "prometheus")
"""What the tests of the live view look at it through."""
# The `cloud` kernel that many virtual machines run has no Soft-RoCE.
KERNEL = "linux-image-amd64"
DEBIAN = "12"
"""Its kernel is the one whose Soft-RoCE is known to work, its pyverbs is built for Python 3.11."""

APT = ("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120", "-o", "Acquire::Retries=2")
MINUTES = 5


class CannotRun(Exception):
    """This machine cannot run the emulated one; the text is why, in one sentence."""


def require_debian() -> None:
    """Refuse a machine on which nothing here can work, before anything is installed."""
    release = _os_release()
    if release.get("ID") != "debian" or release.get("VERSION_ID") != DEBIAN:
        raise CannotRun(
            f"it needs Debian {DEBIAN}, this machine runs {release.get('PRETTY_NAME', 'another')}"
        )
    if platform.machine() != "x86_64":
        raise CannotRun(f"it needs an x86_64 machine, this one is {platform.machine()}")
    if os.geteuid() != 0:
        raise CannotRun("it needs root, to install Debian's packages and to read all files")


def install(names: Sequence[str] = NEEDED) -> None:
    """Install what is missing of these. Raises CannotRun when it cannot be had."""
    missing = [name for name in names if not _is_installed(name)]
    if not missing:
        return
    print(f"installing {' '.join(missing)}", flush=True)
    command = [*APT, "install", "-y", "--no-install-recommends", *missing]
    if _run(command).returncode == 0:
        return
    # A fresh machine has no package lists, or stale ones.
    _run([*APT, "update"])
    outcome = _run(command)
    if outcome.returncode != 0:
        raise CannotRun(f"Debian's packages cannot be installed: {_last_line(outcome.stderr)}")


def download_kernel(folder: Path) -> Path:
    """The stock kernel's package, as a file in `folder`; it is never installed."""
    outcome = _download(folder)
    if outcome.returncode != 0:
        _run([*APT, "update"])
        outcome = _download(folder)
    packages = list(folder.glob("*.deb"))
    if outcome.returncode != 0 or len(packages) != 1:
        raise CannotRun(f"Debian's kernel cannot be downloaded: {_last_line(outcome.stderr)}")
    return packages[0]


def kernel_version() -> str | None:
    """The version of the kernel's package that apt would fetch now; None where apt knows none."""
    name = _kernel_package()
    shown = _run(["apt-cache", "show", "--no-all-versions", name]).stdout if name else ""
    versions = [line.split()[1] for line in shown.splitlines() if line.startswith("Version:")]
    return f"{name}_{versions[0]}" if versions else None


def _download(folder: Path) -> subprocess.CompletedProcess[str]:
    # apt drops its rights when it downloads into a folder that its own user may write to.
    folder.chmod(0o777)
    return _run([*APT, "download", _kernel_package() or KERNEL], folder=folder)


def _kernel_package() -> str | None:
    """The package behind the name that always means the newest kernel."""
    shown = _run(["apt-cache", "depends", KERNEL]).stdout
    names = [line.split()[-1] for line in shown.splitlines() if "Depends: linux-image-" in line]
    return names[0] if names else None


def _is_installed(name: str) -> bool:
    status = _run(["dpkg-query", "-W", "-f", "${db:Status-Status}", name])
    return status.returncode == 0 and status.stdout == "installed"


def _run(command: list[str], *, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=60 * MINUTES,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no end after {MINUTES} minutes")


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "apt gave no reason"


def _os_release() -> dict[str, str]:
    try:
        return platform.freedesktop_os_release()
    except OSError:
        return {}


if __name__ == "__main__":
    try:
        require_debian()
        install()
        install(LOOKS)
    except CannotRun as reason:
        print(f"test-rdma: nothing was installed: {reason}")
