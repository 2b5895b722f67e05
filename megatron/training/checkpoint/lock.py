"""One writer for each folder of checkpoints: a second run is refused, a dead one holds nothing.

The lock is the file SAVE/writer.lock. It says who writes (host, pid, since when), and its holder
renews its time of change every few seconds for as long as it lives.

What it relies on, which local disks, NFS (3 and 4), Lustre, GPFS and BeeGFS all give:
- creating a file exclusively (O_EXCL) succeeds for one of several that try at once;
- a rename replaces a file in one step;
- opening a file asks the server for its content and time of change (NFS's close-to-open rule).
It needs neither flock nor fcntl locks, which many clusters mount away or keep to one host, and it
never compares the clocks of two hosts: whoever finds a lock watches by its own clock whether the
file changes. If it does, its holder lives. If it has not for EXPIRY_SECONDS, its holder is dead.
No time is lost where the same kernel can tell at once: on the holder's own host, in its own pid
namespace, its process is there or not. The time at which a process was started tells its pid
from the same pid used again.

A lock whose holder is dead is replaced by a rename, and read again after a moment, so that of two
that replace it at once the last has it and the other knows. A holder that stood still for so long
that it was taken for dead finds out before it shows its next checkpoint, and stops. No torch.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hetero.errors import OutputError, UserError

LOCK_FILE = "writer.lock"
HEARTBEAT_SECONDS = 5.0
"""Between two renewals."""
EXPIRY_SECONDS = 45.0
"""A lock that was not renewed for so long is a dead run's. Below the shortest timeout of a job."""
_POLL_SECONDS = 1.0
_SETTLE_SECONDS = 1.0
"""Until all that replaced one stale lock at once have done so."""
_TRIES = 5

Say = Callable[[str], None]


class LockLost(OutputError):
    """Another run writes to the folder now."""


@dataclass(frozen=True)
class Owner:
    """Who holds a lock. `kernel` and `started` are empty where the system does not tell them."""

    token: str
    host: str
    pid: int
    since: str
    job: str
    kernel: str
    """Tells apart hosts, their boots and the namespaces in which pids and times mean something."""
    started: str

    def __str__(self) -> str:
        job = f", {self.job}" if self.job else ""
        return f"host {self.host}, pid {self.pid}{job}, since {self.since}"

    @classmethod
    def this_process(cls) -> Owner:
        slurm = os.environ.get("SLURM_JOB_ID")
        return cls(
            token=uuid.uuid4().hex,
            host=socket.gethostname(),
            pid=os.getpid(),
            since=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            job=f"Slurm job {slurm}" if slurm else "",
            kernel=_kernel(),
            started=_start_of(os.getpid()) or "",
        )

    @property
    def lives(self) -> bool | None:
        """Whether its process is there; None where that cannot be seen from here."""
        mine = (socket.gethostname(), _kernel())
        if not self.kernel or not self.started or (self.host, self.kernel) != mine:
            return None
        return _start_of(self.pid) == self.started


@dataclass(frozen=True)
class _LockFile:
    """A lock file at one moment. Two that are equal have not been renewed between."""

    content: bytes
    changed_ns: int

    @property
    def owner(self) -> Owner | None:
        """None where it was read before it was written, or is nobody's of ours."""
        try:
            return Owner(**json.loads(self.content))
        except (ValueError, TypeError):
            return None


class SaveLock:
    """The right to write to one folder, from `take` until `release`. A context manager."""

    def __init__(self, path: Path, owner: Owner, descriptor: int) -> None:
        self._path, self._owner, self._descriptor = path, owner, descriptor
        self._guard = threading.Lock()
        self._over = threading.Event()
        self._heartbeat = threading.Thread(target=self._beat, name="save lock", daemon=True)
        self._heartbeat.start()

    @classmethod
    def take(cls, save: Path, *, say: Say) -> SaveLock:
        """Hold the folder, which is made if need be. `say` is told what takes time, or is odd.

        Waits no longer than EXPIRY_SECONDS and a little. Raises UserError: another run holds it.
        """
        path, owner = save / LOCK_FILE, Owner.this_process()
        try:
            save.mkdir(parents=True, exist_ok=True)
            descriptor = _create(path, owner)
            for _ in range(_TRIES):
                if descriptor is not None:
                    return cls(path, owner, descriptor)
                descriptor = _replace_dead(path, owner, say)
        except OSError as error:
            raise UserError(
                f"{path} cannot be written ({error.strerror}), so that nothing would keep another "
                f"run from writing to {save}; name another folder"
            ) from error
        raise UserError(f"{path} changes hands all the time; see which runs save to {save}")

    def require_held(self) -> None:
        """Raise LockLost if another run took the folder over, and OSError if it cannot be read.

        A lock file that somebody removed is made again.
        """
        with self._guard:
            seen = _read(self._path)
            if seen is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = _create(self._path, self._owner)
                if descriptor is not None:
                    os.close(self._descriptor)
                    self._descriptor = descriptor
                    return
                seen = _read(self._path)
            owner = None if seen is None else seen.owner
            if owner is None or owner.token != self._owner.token:
                raise LockLost(
                    f"another run ({owner or 'unknown'}) took over {self._path.parent}, as this "
                    f"one did not renew {LOCK_FILE} for {EXPIRY_SECONDS:.0f} s; this run ends, "
                    "and what it saved before is still there"
                )

    def release(self) -> None:
        """Let the next run in. What is not ours any more stays."""
        self._over.set()
        # A beat that hangs, as the file system may, must not keep the process.
        if not self._guard.acquire(timeout=HEARTBEAT_SECONDS):
            return
        with suppress(OSError):
            os.close(self._descriptor)
            seen = _read(self._path)
            if seen is not None and seen.owner == self._owner:
                self._path.unlink()
        self._guard.release()

    def _beat(self) -> None:
        while not self._over.wait(HEARTBEAT_SECONDS):
            # A server that is away for a moment comes back; a longer absence others judge.
            with self._guard, suppress(OSError):
                if not self._over.is_set():
                    os.utime(self._descriptor)

    def __enter__(self) -> SaveLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def is_held_by_another(folder: Path, *, say: Say) -> bool:
    """Whether a process other than this one writes to a folder. May watch its lock for a while."""
    try:
        seen = _read(folder / LOCK_FILE)
        if seen is None:
            return False
        owner = seen.owner
        if owner is not None and owner.pid == os.getpid() and owner.lives:
            return False
        return _reason_holder_is_dead(folder / LOCK_FILE, seen, say) is None
    except OSError:  # nothing is known, and nothing should be touched
        return True


def _create(path: Path, owner: Owner) -> int | None:
    """The new lock's descriptor, or None if there is one already."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return None
    try:
        os.write(descriptor, json.dumps(asdict(owner)).encode())
        os.fsync(descriptor)
        # What it will be renewed by.
        os.utime(descriptor)
    except OSError:
        os.close(descriptor)
        path.unlink()
        raise
    return descriptor


def _replace_dead(path: Path, owner: Owner, say: Say) -> int | None:
    """Take the place of a dead holder; None if it has to be tried again. Raises UserError."""
    seen = _read(path)
    if seen is None:
        return _create(path, owner)
    reason = _reason_holder_is_dead(path, seen, say)
    if reason is None:
        now = _read(path) or seen
        raise UserError(
            f"another run ({now.owner or 'it has not said who it is'}) writes to {path.parent}; "
            "wait for its end, stop it, or name another folder with --save"
        )
    fresh = path.with_name(f"{path.name}.{owner.token}")
    descriptor = _create(fresh, owner)
    if descriptor is None or _read(path) != seen:
        fresh.unlink()
        return None
    os.replace(fresh, path)
    time.sleep(_SETTLE_SECONDS)
    held = _read(path)
    if held is None or held.owner != owner:
        os.close(descriptor)
        return None
    say(f"{path.parent} is taken over from a run that ended ({seen.owner or 'unknown'}): {reason}")
    return descriptor


def _reason_holder_is_dead(path: Path, seen: _LockFile, say: Say) -> str | None:
    """Why the holder of a lock is dead; None if it lives. Watches where only time can tell."""
    owner = seen.owner
    lives = None if owner is None else owner.lives
    if lives is not None:
        return None if lives else "its process is gone"
    say(
        f"{path} names another run ({owner or 'which has not said who it is'}); watching for up to "
        f"{EXPIRY_SECONDS:.0f} s whether it still renews it"
    )
    until = time.monotonic() + EXPIRY_SECONDS
    while time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
        now = _read(path)
        if now is None:
            return "it has just ended"
        if now != seen:
            return None
    return f"it did not renew {path.name} for {EXPIRY_SECONDS:.0f} s"


def _read(path: Path) -> _LockFile | None:
    # Opened anew each time: that is when a network file system asks its server.
    try:
        with path.open("rb") as file:
            return _LockFile(file.read(), os.fstat(file.fileno()).st_mtime_ns)
    except FileNotFoundError:
        return None


def _kernel() -> str:
    try:
        names = [Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
        names.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        return ""
    with suppress(OSError):  # older kernels know none of time
        names.append(os.readlink("/proc/self/ns/time"))
    return " ".join(names)


def _start_of(pid: int) -> str | None:
    """When a process was started, in ticks since the boot; None if it is not there, or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # Its name, in brackets, may hold anything.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields[19]
