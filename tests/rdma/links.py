"""Links over the emulated NICs, for the tests that choose rails, rings and deadlines themselves."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

from tests.hetero.link.transports import Transport, open_rdma
from tests.rdma.rails import Rail


def verbs_over(rails: Sequence[Rail], **options: int) -> Transport:
    """A transport, as the contract's harness opens it, over these rails alone."""
    nics = [[rail.devices[rank] for rail in rails] for rank in range(2)]
    return Transport("verbs", functools.partial(open_rdma, nics=nics, **options))


class Heard(logging.Handler):
    """What a process's links have said of their rails."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("hetero").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
