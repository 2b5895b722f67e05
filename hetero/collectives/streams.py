"""Where the work of calls goes on a GPU: into the caller's stream, or into one of the group's.

A call that its caller waits for at once goes into the caller's own stream. Any other goes into one
of the group's, which begins after what the caller had enqueued, and which `wait()` has the caller's
stream wait for. On a CPU there are no streams, and nothing of this does anything.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext

import torch


class CallStream:
    """The stream of one thread that carries calls out."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._under_way: deque[tuple[torch.cuda.Event, object]] = deque()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def now(self) -> torch.cuda.Event | None:
        """The end of what the current stream was given so far; None on a CPU."""
        if self._stream is None:
            return None
        return torch.cuda.current_stream(self._device).record_event()

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
            torch.cuda.current_stream(self._device).synchronize()

    def after(self, moment: torch.cuda.Event | None) -> AbstractContextManager[None]:
        """What is enqueued inside goes into this stream, after that moment."""
        if self._stream is None or moment is None:
            return nullcontext()
        self._stream.wait_event(moment)
        return torch.cuda.stream(self._stream)
