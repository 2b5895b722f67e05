"""A transfer that a thread of its link brings to an end, and how a caller waits for that."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from hetero.errors import LinkError
from hetero.link.base import Link, Work

# The thread meets the link's own deadline first and says what was wrong.
_GRACE_SECONDS = 3.0


@dataclass(eq=False)
class Transfer(Work):
    """A tensor on its way. The link's thread sets `ended`, and `error` first if there is one."""

    link: Link
    tensor: torch.Tensor
    is_receive: bool
    ended: threading.Event = field(default_factory=threading.Event)
    error: LinkError | None = None

    def done(self) -> bool:
        return self.ended.is_set()

    def wait(self) -> None:
        """Block until the transfer has ended; raise what went wrong with it."""
        timeout = self.link.description.timeout
        if not self.ended.is_set():
            with self.link.timed_wait():
                came = self.ended.wait(timeout + _GRACE_SECONDS)
            if not came:
                raise self.link.failure(
                    f"nothing moved for {timeout:g} s",
                    expected=f"a tensor of shape {tuple(self.tensor.shape)}",
                    remedy="see what the peer's log says it waits for",
                )
        if self.error is not None:
            raise self.error

    def fail(self, error: LinkError) -> None:
        """End it with an error, unless it has ended already."""
        if not self.ended.is_set():
            self.error = error
            self.ended.set()


def start_threads(
    name: str, *, send: Callable[[], None], recv: Callable[[], None]
) -> list[threading.Thread]:
    """The two threads of a link, sender first. They never keep the process alive."""
    threads = [
        threading.Thread(target=target, name=f"{name} {direction}", daemon=True)
        for direction, target in (("send", send), ("recv", recv))
    ]
    for thread in threads:
        thread.start()
    return threads
