"""Makes what the emulated machine boots: Debian's kernel, and a small first root file system."""

from __future__ import annotations

import gzip
import hashlib
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.rdma.machine import packages

INIT = Path(__file__).parent / "guest" / "init"
BUSYBOX = Path("/bin/busybox")
# Soft-RoCE computes its checksums with crc32, but does not ask for the module that has it.
MODULES = (
    *("virtio_pci", "9pnet_virtio", "9p", "overlay"),
    *("veth", "crc32_generic", "rdma_rxe", "rdma_ucm"),
)


@dataclass(frozen=True)
class Image:
    """The two files that QEMU loads."""

    kernel: Path
    initrd: Path


def prepare(cache: Path) -> Image:
    """The image in `cache`, made first where it is not there or not of the present kernel.

    Raises CannotRun when Debian's kernel cannot be downloaded.
    """
    version = packages.kernel_version()
    if version is not None and (found := cache / _key(version)).is_dir():
        return _image(found)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="making-") as name:
        work = Path(name)
        made = work / "made"
        made.mkdir()
        package = packages.download_kernel(work)
        _unpack(package, work / "root", made)
        # The download may have brought apt's lists up to date, and so another version.
        kept = cache / _key(packages.kernel_version() or package.stem)
        for old in cache.iterdir():
            if old != work:
                shutil.rmtree(old)
        made.rename(kept)
    return _image(kept)


def _image(folder: Path) -> Image:
    return Image(kernel=folder / "vmlinuz", initrd=folder / "initrd.gz")


def _key(version: str) -> str:
    """Names an image by all that it is made from."""
    content = INIT.read_bytes() + "".join(MODULES).encode()
    return f"{version}_{hashlib.sha256(content).hexdigest()[:12]}"


def _unpack(package: Path, root: Path, made: Path) -> None:
    """The kernel and the first root file system out of an unpacked kernel package."""
    _call(["dpkg", "-x", str(package), str(root)])
    (kernel,) = (root / "boot").glob("vmlinuz-*")
    version = kernel.name.removeprefix("vmlinuz-")
    _call(["depmod", "-b", str(root), version])
    first = root / "first"
    for folder in ("bin", "modules", "proc", "sys", "dev", "host", "scratch", "root"):
        (first / folder).mkdir(parents=True)
    shutil.copy(BUSYBOX, first / "bin")
    (first / "bin" / "sh").symlink_to("busybox")
    shutil.copy(INIT, first / "init")
    (first / "init").chmod(0o755)
    order = [module for name in MODULES for module in _module_files(name, root, version)]
    for module in order:
        shutil.copy(module, first / "modules")
    names = dict.fromkeys(module.name for module in order)
    (first / "modules" / "order").write_text("\n".join(names) + "\n")
    _pack(first, made / "initrd.gz")
    shutil.copy(kernel, made / "vmlinuz")


def _module_files(name: str, root: Path, version: str) -> list[Path]:
    """A module's files in the order in which they have to be loaded; none where it is built in."""
    shown = _call(["modprobe", "-d", str(root), "-S", version, "--show-depends", name])
    lines = [line.split() for line in shown.splitlines()]
    return [Path(words[1]) for words in lines if words[0] == "insmod"]


def _pack(folder: Path, target: Path) -> None:
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    archive = subprocess.run(
        ["cpio", "--quiet", "-o", "-H", "newc", "-R", "0:0"],
        cwd=folder,
        input="\n".join(names).encode(),
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    target.write_bytes(gzip.compress(archive, compresslevel=1))


def _call(command: list[str]) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
