"""Making a NIC's writes visible to a device by reading them back over the same NIC.

A completion says that the NIC has handed its writes to the bus, not that the device's own work sees
them. A read that follows writes of the same requester on the bus cannot pass them, so that its
answer shows that they have landed. The rail's own connection reads the memory of the peer; to read
that of this side, a NIC needs a second queue pair, which is connected with itself.
"""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from typing import Any

from hetero.transport.chunked import Chunk
from hetero.transport.verbs.connection import PairEnd, connect_pair, stop_pair
from hetero.transport.verbs.devices import Port
from hetero.transport.verbs.library import Verbs
from hetero.transport.verbs.memory import Registration

READ_BACK = 1 << 63
"""The number of a read-back's request. It tells a failed one, whose opcode means nothing."""
READS_AT_ONCE = 1
READ_BYTES = 1
_MAX_PSN = 1 << 24

Arrival = tuple[int, Chunk]
"""A chunk that a completion has announced, and its number."""


class ReadBack:
    """The read-backs of one rail. Not for several threads at once.

    One is under way at a time, for all chunks that were announced before it was posted; what is
    announced meanwhile waits for the next. So their number follows the polling, not the chunks.
    """

    def __init__(
        self,
        verbs: Verbs,
        port: Port,
        *,
        pair: Any,
        request: tuple[Any, Any],
        source: Registration,
        landing: tuple[Registration, int],
    ) -> None:
        """`pair` takes `READS_AT_ONCE` requests, and `request` is an RDMA read with its element.

        `source` is the device's memory; what was read goes to an offset of host memory.
        """
        self.live = True
        self._since: float | None = None
        """When the one under way was posted (time.monotonic)."""
        self._verbs = verbs
        self._port = port
        self._pair = pair
        self._source = source
        element, self._request = request
        target, offset = landing
        element.addr, element.length, element.lkey = target.base + offset, READ_BYTES, target.lkey
        self._request.wr_id = READ_BACK
        self._waiting: list[Arrival] = []
        self._under_way: list[Arrival] = []
        self._last_byte = 0

    def connect(self) -> None:
        """Join the queue pair with itself. Raises the library's own error."""
        enums = self._verbs.enums
        here = PairEnd(self._port, int(self._pair.qp_num), secrets.randbelow(_MAX_PSN))
        access = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_READ
        connect_pair(self._verbs, self._pair, here=here, there=here, access=access)

    @property
    def busy(self) -> bool:
        """Whether there are chunks whose bytes are not known to be visible."""
        return bool(self._waiting or self._under_way)

    def is_late(self, before: float) -> bool:
        """Whether the one under way was posted before this time (time.monotonic)."""
        return self._since is not None and self._since < before

    def add(self, arrival: Arrival, *, last_byte: int) -> None:
        """Note a chunk that ends at this offset of the device's memory; forgotten once stopped."""
        if self.live:
            self._waiting.append(arrival)
            self._last_byte = last_byte

    def start(self) -> None:
        """Post a read for what waits, if there is any and none is under way.

        Stops and raises the library's own error when the NIC does not take it.
        """
        if not self._waiting or self._under_way:
            return
        self._request.set_wr_rdma(self._source.rkey, self._source.base + self._last_byte)
        try:
            self._pair.post_send(self._request)
        except self._verbs.error:
            self.stop()
            raise
        self._under_way, self._waiting = self._waiting, []
        self._since = time.monotonic()

    def finish(self) -> list[Arrival]:
        """The chunks whose bytes are visible now that the read under way has been answered."""
        visible, self._under_way = self._under_way, []
        self._since = None
        return visible

    def stop(self) -> None:
        """Forget what is not visible yet: it has to come again, over another rail."""
        if not self.live:
            return
        self.live = False
        self._since = None
        self._waiting, self._under_way = [], []
        with suppress(self._verbs.error):
            stop_pair(self._verbs, self._pair)
