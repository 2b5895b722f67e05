"""Where the work of calls goes on a GPU: into the caller's stream, or into one of the group's.

A call that its caller waits for at once goes into the caller's own stream. Any other goes into one
of the group's, which begins after what the caller had enqueued, and which `wait()` has the caller's
stream wait for. On a CPU there are no streams, and nothing of this does anything.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

from hetero.device.gpu import require_no_capture


@cache
def _stream_of(handle: int, index: int) -> torch.cuda.Stream:
    return torch.cuda.current_stream(index)


def current_stream(index: int) -> torch.cuda.Stream:
    """As torch.cuda.current_stream, which takes microseconds to make an object each time."""
    return _stream_of(torch._C._cuda_getCurrentRawStream(index), index)


class _Within:
    """As torch.cuda.stream, which asks for the current device and stream many times over."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self._index = stream, stream.device_index

    def __enter__(self) -> None:
        self._device = torch._C._cuda_getDevice()
        self._before = current_stream(self._index)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_stream(self._before)
        if self._device != self._index:
            torch.cuda.set_device(self._device)


class CallStream:
    """The stream of a group's calls that are not in their callers', one call at a time."""

    def __init__(self, device: torch.device) -> None:
        self._under_way: deque[tuple[torch.cuda.Event, object]] = deque()
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._index = self._stream.device_index
            self._within = _Within(self._stream)

    @property
    def exists(self) -> bool:
        return self._stream is not None

    def require_no_capture(self) -> None:
        """Refuse a call that a CUDA graph would replay, before anything of it has begun."""
        if self._stream is not None:
            require_no_capture()

    def now(self) -> torch.cuda.Event | None:
        """The end of what the current stream was given so far; None on a CPU."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(current_stream(self._index))
        return event

    def end_of(self, work: object) -> torch.cuda.Event | None:
        """The end of work in the current stream, which is kept until then: it holds tensors."""
        end = self.now()
        if end is not None:
            while self._under_way and self._under_way[0][0].query():
                self._under_way.popleft()
            self._under_way.append((end, work))
        return end

    def synchronize(self) -> None:
        """Block until the GPU has done all that this stream and the caller's were given."""
        if self._stream is not None:
            self._stream.synchronize()
            current_stream(self._index).synchronize()

    def follow(self, moment: torch.cuda.Event | None) -> None:
        """Have this stream go on after that moment."""
        if self._stream is not None and moment is not None:
            moment.wait(self._stream)

    def within(self) -> AbstractContextManager[None]:
        """What is enqueued inside goes into this stream."""
        return nullcontext() if self._stream is None else self._within
