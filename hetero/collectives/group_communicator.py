"""One rank's part in a group of several vendors: its calls in order, and how they end.

Knows nothing of c10d's process groups. A call is carried out by `Exchange` and what the files of
the algorithms do with it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist

from hetero.collectives.blame import (
    ABORTED,
    IDLE,
    IN_A_CALL,
    LEFT,
    LOOK_SECONDS,
    Blackboard,
    CollectiveError,
    Statement,
    explain,
)
from hetero.collectives.calls import Call
from hetero.collectives.exchange import Exchange, Steps
from hetero.collectives.group_links import Link, Links, clone
from hetero.collectives.inside_vendor import VendorLibrary, new_library
from hetero.collectives.mailbox import Mailbox
from hetero.collectives.messages import DeviceMessages
from hetero.collectives.streams import CallStream
from hetero.collectives.vendor_layout import Layout
from hetero.collectives.work import CollectiveWork, Worker
from hetero.errors import LinkError

_CLOSE_SECONDS = 5.0
_MAIL_SECONDS = 365 * 24 * 3600.0

Algorithm = Callable[[Exchange], Steps]


@dataclass(frozen=True, slots=True)
class _Named:
    """A call as errors name it."""

    call: Call
    group: str

    def __str__(self) -> str:
        return f"{self.call} of group {self.group}"


@cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _are_inference(work: CollectiveWork) -> bool:
    return any(tensor.is_inference() for tensor in work.result())


class Communicator:
    """The calls of one group, for tensors of one kind of device.

    Building it is collective. `store` is this group's own and is used by no other thread.
    """

    def __init__(
        self,
        *,
        layout: Layout,
        name: str,
        store: dist.Store,
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        self.layout, self.name, self.device = layout, name, device
        self.timeout = timeout.total_seconds()
        self._store = store
        self._blackboard = Blackboard(store, layout)
        self._library: VendorLibrary | None = None
        if len(layout.mine) > 1:
            backend = new_library(
                device.type,
                dist.PrefixStore(f"vendor {layout.vendor}/", store),
                rank=layout.place,
                size=len(layout.mine),
                timeout=timeout,
            )
            look = self._look_in_a_call if device.type == "cpu" else None
            self._library = VendorLibrary(backend, timeout=timeout, look=look)
        self._links = Links(
            layout=layout,
            store=dist.PrefixStore("links/", store),
            device=device,
            timeout=self.timeout,
        )
        self._exchange = Exchange(
            layout=layout, library=self._library, link_to=self._links.to, device=device
        )
        self._stream = CallStream(device)
        self._messages = self._new_messages(clone(store))
        self._sequence = 0
        self._order = threading.Lock()
        self._last: Call | None = None
        self._error: CollectiveError | None = None
        self._met = False
        self._worker = Worker(f"{name} calls", idle=self._look, seconds=LOOK_SECONDS)

    def _new_messages(self, store: dist.Store) -> Mailbox | DeviceMessages:
        store = dist.PrefixStore("mail/", store)
        if self.device.type == "cpu":
            links = Links(
                layout=self.layout, store=store, device=self.device, timeout=_MAIL_SECONDS
            )
            return Mailbox(layout=self.layout, links=links, store=store)
        links = Links(layout=self.layout, store=store, device=self.device, timeout=self.timeout)
        return DeviceMessages(links=links, store=store, device=self.device)

    @property
    def sequence(self) -> int:
        return self._sequence

    def run(
        self,
        algorithm: Algorithm,
        *,
        operation: str,
        tensors: list[torch.Tensor],
        common: torch.Tensor | None = None,
        reduction: str = "",
        root: int | None = None,
        blocking: bool = False,
    ) -> CollectiveWork:
        """Carry out one call of the group, after those before it.

        Args:
            tensors: what the work's future holds.
            common: a tensor whose dtype and number of elements all ranks have alike.
            root: in the group.
            blocking: whether the caller would wait at once.
        """
        with self._order:
            self._sequence += 1
            call = Call(
                sequence=self._sequence,
                operation=operation,
                dtype="" if common is None else _name_of(common.dtype),
                shape=() if common is None else (common.numel(),),
                reduction=reduction,
                root=None if root is None else self.layout.members[root].global_rank,
            )
            work = CollectiveWork(_Named(call, self.name), tensors, timeout=self.timeout)
            if blocking and self._worker.carry_out(lambda: self._carry_out(algorithm, call, work)):
                return work
            moment = self._stream.now()
            self._worker.submit(lambda: self._carry_out_after(moment, algorithm, call, work))
            return work

    def _carry_out_after(
        self,
        moment: torch.cuda.Event | None,
        algorithm: Algorithm,
        call: Call,
        work: CollectiveWork,
    ) -> None:
        """Carry a call out in the thread of calls, after what its caller had enqueued before."""
        with self._stream.after(moment):
            self._carry_out(algorithm, call, work, elsewhere=True)

    def links(self) -> list[Link]:
        """Those to ranks of other vendors that its collectives have opened so far."""
        return self._links.across()

    def check(self) -> None:
        """Raise what has broken the group or a link of it, if anything did. Between two calls."""
        if self._error is not None:
            raise self._error
        self._links.check()

    def drain(self) -> None:
        """Block until all calls so far are enqueued, and a GPU has come to the end of them."""
        done = CollectiveWork("the calls so far", [], timeout=self.timeout)
        self._worker.submit(done.finish)
        done.wait()
        self._stream.synchronize()

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> CollectiveWork:
        work = self._mail_work("send to", rank, tag, tensor)
        self._messages.send(tensor, rank, tag, work)
        return work

    def recv(
        self, tensor: torch.Tensor, rank: int | None, tag: int, done: Callable[[], None]
    ) -> CollectiveWork:
        work = self._mail_work("receive from", rank, tag, tensor)
        self._messages.recv(tensor, rank, tag, work, done)
        return work

    def _mail_work(
        self, verb: str, rank: int | None, tag: int, tensor: torch.Tensor
    ) -> CollectiveWork:
        whom = "any rank" if rank is None else str(self.layout.members[rank])
        what = f"{verb} {whom} with tag {tag} in group {self.name}"
        return CollectiveWork(what, [tensor], timeout=self.timeout)

    def abort(self) -> None:
        """End every call under way with an error, here and, by that, at the other ranks."""
        if self._error is None:
            self._error = CollectiveError(f"group {self.name} was aborted; make a new one")
            self._state(ABORTED, alarm=True)
        self._release()

    def shutdown(self) -> None:
        """Leave the group once the calls under way have ended."""
        self._worker.close(seconds=self.timeout)
        self._state(LEFT)
        self._messages.close()
        self._links.close()
        if self._library is not None:
            self._library.shutdown()

    def _carry_out(
        self, algorithm: Algorithm, call: Call, work: CollectiveWork, *, elsewhere: bool = False
    ) -> None:
        """`elsewhere`: not in the caller's stream."""
        if self._error is not None:
            work.finish(self._error)
            return
        try:
            self._links.check()
            if not self._met:
                # Ascending everywhere, so that no two wait for each other in a circle.
                for rank in sorted({*self.layout.neighbours, *self.layout.team}):
                    self._links.to(rank)
                self._met = True
            self._exchange.begin(call)
            # The caller's modes are not those of another thread.
            with (
                torch.inference_mode()
                if elsewhere and _are_inference(work)
                else contextlib.nullcontext()
            ):
                # NCCL's kernels would wait for the CPU; there the deadline finds what differs.
                if self.device.type == "cpu":
                    self._exchange.compare_inside().wait()
                for moves in algorithm(self._exchange):
                    moves.wait()
        except Exception as error:
            work.finish(self._fail(call, error))
        else:
            self._last = call
            work.finish(enqueued=self._stream.end_of(algorithm) if elsewhere else None)

    def _fail(self, call: Call, error: Exception) -> CollectiveError:
        """Tell the others, hear them, and end the group."""
        own = Statement(
            rank=self.layout.rank,
            state=IN_A_CALL,
            call=call,
            error=str(error),
        )
        self._blackboard.state(own, alarm=True)
        self._release()
        if self._error is None:
            statements = self._blackboard.collect(own)
            text = self._explained(statements, own)
            self._error = CollectiveError(text)
            self._error.__cause__ = error
        return self._error

    def _explained(self, statements: list[Statement], own: Statement) -> str:
        return explain(self.name, self.layout, statements, own=own, timeout=self.timeout)

    def _release(self) -> None:
        """Let go of what other ranks wait for, so that they fail too and say so."""
        with contextlib.suppress(Exception):
            if self._library is not None:
                self._library.abort()
        with contextlib.suppress(Exception):
            self._links.close()
        with contextlib.suppress(Exception):
            self._messages.close()

    def _look(self) -> None:
        """In no call: has another rank's call failed, or a link that a GPU still works with?"""
        if self._error is not None:
            return
        problem = ""
        try:
            self._links.check()
        except LinkError as error:
            problem = str(error)
        if problem or self._blackboard.alarmed():
            own = self._state(IDLE, alarm=bool(problem), error=problem)
            statements = self._blackboard.collect(own)
            self._error = CollectiveError(self._explained(statements, own))
            self._release()

    def _look_in_a_call(self) -> None:
        """Give up a wait for this vendor's library once another rank's call has failed."""
        if self._error is not None:
            raise self._error
        if self._blackboard.alarmed():
            raise RuntimeError("another rank's call failed meanwhile")

    def _state(self, state: str, *, alarm: bool = False, error: str = "") -> Statement:
        own = Statement(rank=self.layout.rank, state=state, call=self._last, error=error)
        self._blackboard.state(own, alarm=alarm)
        return own
