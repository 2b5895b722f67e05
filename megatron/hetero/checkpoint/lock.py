"""A lock on a folder of checkpoints, so that one run writes to it. A dead run's lock is replaced.

The lock is the file SAVE/writer.lock. It names its holder (host, pid, start), which updates the
file's modification time every HEARTBEAT_SECONDS.

It relies on three properties of local disks, NFS (3 and 4), Lustre, GPFS and BeeGFS:
- if several processes create a file exclusively (O_EXCL), one succeeds;
- a rename replaces a file atomically;
- opening a file fetches content and modification time from the server (NFS's close-to-open rule).
It needs neither flock nor fcntl locks, which many clusters disable or keep local to a host, and
does not compare the clocks of hosts: a run that finds a lock watches the file by its own clock. If
the file does not change for EXPIRY_SECONDS, the holder is dead. On the holder's host, in its pid
namespace, no wait is needed, because the kernel knows whether the process exists; the start time
distinguishes it from a later process with the same pid. A job that its launcher has started again
takes over its own lock at once, from whichever host: the launcher has ended the processes that held
it, or lost their node. One that lives on unseen notices as a suspended holder does.

A dead holder's lock is replaced by a rename and read again after _SETTLE_SECONDS: if two runs
replace it at once, the last one holds it and the other notices. A holder that was suspended for so
long that its lock was replaced notices before it commits its next checkpoint, and stops. Does not
import torch.
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

from hetero.errors import HeteroError, UserError
from hetero.recover.node_state import JOB_VARIABLE

LOCK_FILE = "writer.lock"
HEARTBEAT_SECONDS = 5.0
"""The time between two renewals."""
EXPIRY_SECONDS = 45.0
"""After which a lock that was not renewed is a dead run's. Less than any timeout of a job."""
_POLL_SECONDS = 1.0
_SETTLE_SECONDS = 1.0
"""Enough for all runs that replace a lock at once to have done so."""
_TRIES = 5
_SAME_JOB = "it is this job's own, which its launcher has started again"

Say = Callable[[str], None]


class LockLost(HeteroError):
    """Another run writes to the folder now."""


@dataclass(frozen=True)
class Owner:
    """A lock's holder. `kernel` and `started` are empty if the system does not provide them."""

    token: str
    host: str
    pid: int
    since: str
    job: str
    kernel: str
    """Boot id and namespaces: only within these can pids and start times be compared."""
    started: str
    """When the process was started, in ticks since the boot."""
    launch: str = ""
    """The launcher's name of the job, equal after every restart; empty where it has none."""

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
            launch=os.environ.get(JOB_VARIABLE, ""),
        )

    @property
    def lives(self) -> bool | None:
        """True if its process exists; None if that is on another host or in another namespace."""
        mine = (socket.gethostname(), _kernel())
        if not self.kernel or not self.started or (self.host, self.kernel) != mine:
            return None
        return _start_of(self.pid) == self.started


@dataclass(frozen=True)
class _LockFile:
    """A lock file as read once. If two reads are equal, it was not renewed in between."""

    content: bytes
    changed_ns: int

    @property
    def owner(self) -> Owner | None:
        """The holder; None if the content is incomplete, or not that of a lock file."""
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
        """Take the lock of a folder, which is created if it does not exist.

        `say` prints a line before a wait, and when a dead run's lock is replaced. Waits slightly
        longer than EXPIRY_SECONDS at most. Raises UserError if another run holds the lock, or if
        the folder cannot be written.
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

    @property
    def token(self) -> str:
        """A string in the file that is unique to this lock."""
        return self._owner.token

    def require_held(self) -> None:
        """Raise LockLost if another run has taken over the folder.

        If the lock file was removed, creates it again. Raises OSError if it cannot be read.
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
        """Remove the lock file, unless another run has replaced it."""
        self._over.set()
        # A renewal that hangs in the file system must not keep the process from ending.
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
            # After a short outage of the file server the next renewal succeeds. After a long outage
            # `require_held` shows whether another run has replaced the lock.
            with self._guard, suppress(OSError):
                if not self._over.is_set():
                    os.utime(self._descriptor)

    def __enter__(self) -> SaveLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def is_held_by_another(folder: Path, *, say: Say) -> bool:
    """Returns whether another process holds a folder's lock. May take up to EXPIRY_SECONDS."""
    try:
        seen = _read(folder / LOCK_FILE)
        if seen is None:
            return False
        owner = seen.owner
        if owner is not None and owner.pid == os.getpid() and owner.lives:
            return False
        return _reason_holder_is_dead(folder / LOCK_FILE, seen, say) is None
    except OSError:  # unknown, so assume the worst
        return True


def _create(path: Path, owner: Owner) -> int | None:
    """Create a lock file; returns its descriptor, or None if the file exists already."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return None
    try:
        os.write(descriptor, json.dumps(asdict(owner)).encode())
        os.fsync(descriptor)
        os.utime(descriptor)  # fails here if it could not be renewed later
    except OSError:
        os.close(descriptor)
        path.unlink()
        raise
    return descriptor


def _replace_dead(path: Path, owner: Owner, say: Say) -> int | None:
    """Replace a dead holder's lock; returns the new one's descriptor, or None to try again.

    Raises UserError if the holder is alive.
    """
    seen = _read(path)
    if seen is None:
        return _create(path, owner)
    is_own = seen.owner is not None and seen.owner.launch == owner.launch != ""
    reason = _SAME_JOB if is_own else _reason_holder_is_dead(path, seen, say)
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
    if not is_own:
        time.sleep(_SETTLE_SECONDS)
    current = _read(path)
    if current is None or current.owner != owner:
        os.close(descriptor)
        return None
    say(f"{path.parent} is taken over from a run that ended ({seen.owner or 'unknown'}): {reason}")
    return descriptor


def _reason_holder_is_dead(path: Path, seen: _LockFile, say: Say) -> str | None:
    """Why the holder of a lock is dead; None if it is alive. Watches the file if necessary."""
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
    # Opened anew each time, because that is when a network file system asks its server.
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
    with suppress(OSError):  # older kernels have no time namespaces
        names.append(os.readlink("/proc/self/ns/time"))
    return " ".join(names)


def _start_of(pid: int) -> str | None:
    """When a process was started, in ticks since the boot; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field, a name in parentheses, may contain spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields[19]
