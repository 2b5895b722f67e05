"""Pinned host memory for snapshots, allocated in a thread while training continues.

Pinning blocks other threads' driver calls while it faults in fresh pages. So memory is allocated in
parts: each is touched first, without the driver, and then pinned, which is short.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator

import psutil
import torch

from hetero.errors import HeteroError
from hetero.text import size_text
from megatron.hetero.checkpoint.device_to_host import DeviceToHostCopier

PART_BYTES = 64 << 20
STALL_SECONDS = 60.0
"""Give up if one part takes longer than this."""
SPARED_BYTES = 512 << 20
"""Host memory to leave free for everything else."""


class HostMemoryError(HeteroError):
    """The host lacks memory for a snapshot, or pinning it failed."""


class HostMemory:
    """Page-aligned memory, pinned if there is an accelerator; allocation starts at once.

    Not inherited by forked processes: a fork would copy all pinned pages.
    """

    def __init__(self, size: int, copies: DeviceToHostCopier) -> None:
        self.size = max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE
        self._copies = copies
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._parts: list[torch.Tensor] = []
        self._problem: Exception | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._make, name="checkpoint memory", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Block until the memory is allocated. Raises HostMemoryError if that fails or stalls."""
        while self._thread.is_alive():
            made = len(self._parts)
            self._thread.join(STALL_SECONDS)
            if self._thread.is_alive() and len(self._parts) == made:
                raise HostMemoryError(
                    f"pinning {size_text(self.size)} has stood still for {STALL_SECONDS:g} s after "
                    f"{size_text(made * PART_BYTES)}"
                )
        if self._problem is not None:
            raise HostMemoryError(_reason(self._problem)) from self._problem

    def spans(self, begin: int, end: int) -> Iterator[torch.Tensor]:
        """The bytes [begin, end), split at the boundaries of separately pinned parts."""
        while begin < end:
            number, offset = divmod(begin, PART_BYTES)
            length = min(PART_BYTES - offset, end - begin)
            yield self._parts[number][offset : offset + length]
            begin += length

    def whole(self, begin: int, end: int) -> torch.Tensor:
        """The bytes [begin, end) as one tensor."""
        return self._bytes[begin:end]

    def close(self) -> None:
        """Unpin and free. No copy may be in progress."""
        self._stopped.set()
        self._thread.join(STALL_SECONDS)
        # A thread still blocked in the driver releases its parts itself when it returns.
        if not self._thread.is_alive():
            self._release()

    def _make(self) -> None:
        try:
            mapping = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            mapping.madvise(mmap.MADV_DONTFORK)
            self._bytes = torch.frombuffer(mapping, dtype=torch.uint8)
            for part in self._bytes.split(PART_BYTES):
                if self._stopped.is_set():
                    break
                self._require_room(part.numel())
                # zero_, unlike an assignment, releases the GIL.
                part[:: mmap.PAGESIZE].zero_()
                self._copies.register(part)
                self._parts.append(part)
            if self._stopped.is_set():
                self._release()
        except Exception as error:  # told by `wait`
            self._problem = error
            self._release()

    def _release(self) -> None:
        while self._parts:
            self._copies.unregister(self._parts.pop())
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def _require_room(self, size: int) -> None:
        """Raise MemoryError before the kernel, which overcommits, would kill the process."""
        free = psutil.virtual_memory().available
        if free < size + SPARED_BYTES:
            raise MemoryError(
                f"{size_text(self.size)} are needed, and {size_text(free)} are free after "
                f"{size_text(len(self._parts) * PART_BYTES)} of them"
            )


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
