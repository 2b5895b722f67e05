"""Connecting a queue pair with another: the states it goes through, and what two ports decide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hetero.transport.verbs.devices import Port
from hetero.transport.verbs.library import Verbs

# 4.096 us * 2**14 before a packet is sent again; 7 tries would mean for ever.
_ACK_TIMEOUT, _TRIES = 14, 6
# A receive is always posted before the peer may use it, so that this only covers a slow start.
_NOT_READY_TIMER, _NOT_READY_TRIES = 12, 6
_HOPS = 64
_READS_AT_ONCE = 1


@dataclass(frozen=True)
class PairEnd:
    """One end of a connection: the port, the number of its queue pair and of its first packet."""

    port: Port
    number: int
    psn: int


def connect_pair(
    verbs: Verbs,
    pair: Any,
    *,
    here: PairEnd,
    there: PairEnd,
    access: int,
    prepare: Callable[[], None] = lambda: None,
) -> None:
    """Let a connection go both ways; `there` may be `here`, which joins the pair with itself.

    `access` is what the other end may do. `prepare` is called once receives may be posted and
    before the other end is heard. Raises the library's own error.
    """
    attributes = verbs.QPAttr(port_num=here.port.number)
    attributes.qp_access_flags = access
    pair.to_init(attributes)
    prepare()
    attributes.path_mtu = min(here.port.mtu, there.port.mtu)
    attributes.dest_qp_num = there.number
    attributes.rq_psn, attributes.sq_psn = there.psn, here.psn
    attributes.max_rd_atomic = attributes.max_dest_rd_atomic = _READS_AT_ONCE
    attributes.min_rnr_timer, attributes.rnr_retry = _NOT_READY_TIMER, _NOT_READY_TRIES
    attributes.timeout, attributes.retry_cnt = _ACK_TIMEOUT, _TRIES
    route = verbs.GlobalRoute(
        dgid=verbs.GID(there.port.gid), sgid_index=here.port.gid_index, hop_limit=_HOPS
    )
    attributes.ah_attr = verbs.AHAttr(
        dlid=there.port.lid,
        port_num=here.port.number,
        is_global=int(here.port.needs_route_to(there.port)),
        gr=route,
    )
    pair.to_rts(attributes)


def stop_pair(verbs: Verbs, pair: Any) -> None:
    """Put a queue pair into the error state: what is under way is flushed. Raises as above."""
    pair.modify(verbs.QPAttr(qp_state=verbs.enums.IBV_QPS_ERR), verbs.enums.IBV_QP_STATE)
