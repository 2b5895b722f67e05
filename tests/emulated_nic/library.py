"""The emulated NIC behind the names under which pyverbs offers the real one."""

from __future__ import annotations

from functools import partial
from typing import Any

from hetero.transport.verbs.library import Verbs
from tests.emulated_nic.objects import (
    CQ,
    ENUMS,
    GID,
    MR,
    PD,
    SGE,
    CompChannel,
    Context,
    DmaBufMR,
    EmulatedError,
    Record,
    RecvWR,
    SendWR,
)
from tests.emulated_nic.pair import QP
from tests.emulated_nic.world import World


class EmulatedVerbs(Verbs):
    """pyverbs over the devices of a world."""

    def open_context(self, name: str) -> tuple[Any, int | None]:
        context = self.Context(name=name)
        return context, context.async_fd

    def open_channel(self, context: Any) -> tuple[Any, int]:
        channel = CompChannel(context)
        return channel, channel.fd


def emulated(world: World) -> EmulatedVerbs:
    return EmulatedVerbs(
        enums=ENUMS,
        error=EmulatedError,
        Context=partial(Context, world),
        PD=PD,
        MR=MR,
        DmaBufMR=DmaBufMR,
        CompChannel=CompChannel,
        CQ=CQ,
        QP=QP,
        QPAttr=Record,
        QPCap=Record,
        QPInitAttr=Record,
        AHAttr=Record,
        GlobalRoute=Record,
        GID=GID,
        SGE=SGE,
        SendWR=SendWR,
        RecvWR=RecvWR,
    )
