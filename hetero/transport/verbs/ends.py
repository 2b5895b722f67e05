"""The two ends of a verbs link, as the proxy of all channels uses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hetero.transport.chunked import Chunk, RecvEnd, SendEnd
from hetero.transport.verbs.channel import Channel


class VerbsSendEnd(SendEnd):
    """Fills slots that a NIC reads."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.slot_bytes = channel.slot_bytes

    def acquire(self, deadline: float | None) -> torch.Tensor | None:
        return self._channel.acquire(deadline)

    def publish(self, chunk: Chunk) -> None:
        self._channel.publish(chunk)

    def close(self) -> None:
        self._channel.close_sending()


class VerbsRecvEnd(RecvEnd):
    """Hands over slots that a NIC has filled."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.slot_bytes = channel.slot_bytes

    def take(self, deadline: float | None) -> tuple[Chunk, torch.Tensor] | None:
        return self._channel.take(deadline)

    def release(self) -> None:
        self._channel.release()

    def refuse(self, reason: str) -> None:
        self._channel.refuse(reason)

    def close(self) -> None:
        self._channel.close_receiving()


@dataclass(frozen=True)
class VerbsEnds:
    """Both directions of one link, and what has to be released once nothing uses them."""

    send: VerbsSendEnd
    recv: VerbsRecvEnd
    rails: tuple[str, ...]
    """The ports that carry it, and how each of them knows the rings' memory."""
    visibility: str
    """What makes a NIC's writes visible at this side, in words."""
    close: Callable[[], None]
