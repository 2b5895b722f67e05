"""One rank's part in a group of several vendors: its calls in order, and how they end.

Knows nothing of c10d's process groups. A call is carried out by `Exchange` and what the files of
the algorithms do with it.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

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
    Heard,
    Statement,
    explain,
)
from hetero.collectives.calls import Call
from hetero.collectives.exchange import Exchange, Moves, Steps
from hetero.collectives.group_links import Link, Links, clone
from hetero.collectives.inside_vendor import VendorLibrary, new_library
from hetero.collectives.mailbox import Mailbox
from hetero.collectives.messages import DeviceMessages
from hetero.collectives.streams import CallStream
from hetero.collectives.vendor_layout import Layout
from hetero.collectives.work import CollectiveWork, Worker
from hetero.errors import LinkError

_CLOSE_SECONDS = 5.0
_NO_MODE = contextlib.nullcontext()
_MAIL_SECONDS = 365 * 24 * 3600.0

Algorithm = Callable[[Exchange], Steps]


class _Course:
    """A call on its way, which may be left off where it would have to wait."""

    __slots__ = ("_exchange", "_moves", "_steps", "algorithm", "has_begun", "in_inference")

    def __init__(self, algorithm: Algorithm, exchange: Exchange) -> None:
        self.algorithm, self.has_begun = algorithm, False
        self.in_inference = False
        """Whether it has made tensors of its caller's inference mode."""
        self._exchange, self._steps = exchange, algorithm(exchange)
        self._moves: Moves | None = None

    def go_on(self, *, blocks: bool) -> bool:
        """Whether it has come to its end."""
        self._exchange.may_block = blocks
        if not self.has_begun:
            self.has_begun = True
            self._moves = next(self._steps, None)
        while self._moves is not None:
            if blocks:
                self._moves.wait()
            elif not self._moves.are_ordered():
                return False
            self._moves = next(self._steps, None)
        return True


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
            look=self._look_in_a_call,
        )
        self._exchange = Exchange(
            layout=layout, library=self._library, links=self._links, device=device
        )
        self._stream = CallStream(device)
        self._messages = self._new_messages(clone(store))
        self._sequence = 0
        self._order = threading.Lock()
        self._last: Call | None = None
        self._error: CollectiveError | None = None
        self._met = False
        self._worker = Worker(f"{name} calls", idle=self._look, seconds=LOOK_SECONDS)
        # A script need not destroy its groups, and Python ends a process abnormally of which a
        # thread is in PyTorch's C++, as one is that looks into the store.
        self._at_exit = weakref.finalize(self, self._worker.close, seconds=_CLOSE_SECONDS)

    def set_timeout(self, timeout: timedelta) -> None:
        """The deadline of calls from now on; messages of a link between GPUs keep the first."""
        self.timeout = timeout.total_seconds()
        self._links.set_timeout(self.timeout)
        if self._library is not None:
            self._library.timeout = timeout

    def _new_messages(self, store: dist.Store) -> Mailbox | DeviceMessages:
        store = dist.PrefixStore("mail/", store)
        on_cpu = self.device.type == "cpu"
        links = Links(
            layout=self.layout,
            store=store,
            device=self.device,
            timeout=_MAIL_SECONDS if on_cpu else self.timeout,
            look=self._require_health,
        )
        if on_cpu:
            return Mailbox(layout=self.layout, links=links, store=store)
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
        common: Sequence[torch.Tensor] = (),
        reduction: str = "",
        root: int | None = None,
        blocking: bool = False,
    ) -> CollectiveWork:
        """Carry out one call of the group, after those before it.

        Args:
            tensors: what the work's future holds.
            common: tensors whose dtype and numbers of elements all ranks have alike.
            root: in the group.
            blocking: whether the caller would wait at once.
        """
        self._stream.require_no_capture()
        with self._order:
            self._sequence += 1
            call = Call(
                self._sequence,
                operation,
                _name_of(common[0].dtype) if common else "",
                tuple([tensor.numel() for tensor in common]),
                reduction,
                None if root is None else self.layout.members[root].global_rank,
            )
            work = CollectiveWork(call, tensors, timeout=self.timeout, group=self.name)
            if self._error is not None:
                work.finish(self._error)
                return work
            course = _Course(algorithm, self._exchange)
            if (blocking or (self._met and self._stream.exists)) and self._worker.begin_turn():
                try:
                    if blocking:
                        self._carry_out(call, work, course)
                    else:
                        self._begin(call, work, course)
                finally:
                    self._worker.end_turn()
            else:
                moment = self._stream.now()
                self._worker.submit(lambda: self._go_on(call, work, course, moment))
        self._worker.catch_up()
        return work

    def _begin(self, call: Call, work: CollectiveWork, course: _Course) -> None:
        """Carry a GPU's call out in the caller's thread as far as no peer has to come first.

        The rest is left to the thread of calls, which waits. So a peer holds the caller up for no
        longer than a look. This keeps the rule by which nothing deadlocks (docs/ring.md), which is
        of the order in which work is enqueued and not of the thread: the links enqueue no wait
        before what ends it, and calls do not overtake each other.
        """
        course.in_inference = torch.is_inference_mode_enabled()
        self._stream.follow(self._stream.now())
        with self._stream.within():
            is_over = self._carry_out(call, work, course, elsewhere=True, blocks=False)
        if not is_over:
            self._worker.submit(lambda: self._go_on(call, work, course, None))

    def _go_on(
        self,
        call: Call,
        work: CollectiveWork,
        course: _Course,
        moment: torch.cuda.Event | None,
    ) -> None:
        """Carry a call out in the thread of calls, after what its caller had enqueued before."""
        self._stream.follow(moment)
        with self._stream.within():
            self._carry_out(call, work, course, elsewhere=True)

    def links(self) -> list[Link]:
        """Those to ranks of other vendors that its collectives have opened so far."""
        return self._links.across()

    def check(self) -> None:
        """Raise what has broken the group or a link of it, if anything did. Between two calls."""
        self._require_health()
        self._links.check()

    def _require_health(self) -> None:
        if self._error is not None:
            raise self._error

    def drain(self) -> None:
        """Block until all calls so far are enqueued, and a GPU has come to the end of them."""
        done = CollectiveWork("the calls so far", [], timeout=self.timeout, group=self.name)
        self._worker.submit(done.finish)
        done.wait()
        self._stream.synchronize()

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> CollectiveWork:
        work: Any = self._mail_work("send to", rank, tag, tensor)
        self._messages.send(tensor, rank, tag, work)
        return work

    def recv(
        self, tensor: torch.Tensor, rank: int | None, tag: int, done: Callable[[], None]
    ) -> CollectiveWork:
        work: Any = self._mail_work("receive from", rank, tag, tensor)
        self._messages.recv(tensor, rank, tag, work, done)
        return work

    def _mail_work(
        self, verb: str, rank: int | None, tag: int, tensor: torch.Tensor
    ) -> CollectiveWork:
        self._stream.require_no_capture()
        whom = "any rank" if rank is None else str(self.layout.members[rank])
        what = f"{verb} {whom} with tag {tag}"
        return self._messages.new_work(what, [tensor], timeout=self.timeout, group=self.name)

    def abort(self) -> None:
        """End every call under way with an error, here and, by that, at the other ranks."""
        if self._error is None:
            self._error = CollectiveError(f"group {self.name} was aborted; make a new one")
            self._state(ABORTED, alarm=True)
        self._release()

    def shutdown(self) -> None:
        """Leave the group once the calls under way have ended. Later ones fail at once."""
        self._worker.close(seconds=self.timeout)
        self._at_exit.detach()  # it holds this object, and so its sockets, for good
        if self._error is None:  # else this rank has stated what it failed in
            self._state(LEFT)
            self._error = CollectiveError(
                f"group {self.name} was destroyed; make a new one, and build anew what uses it"
            )
        self._messages.close()
        self._links.close()
        if self._library is not None:
            self._library.shutdown()

    def _carry_out(
        self,
        call: Call,
        work: CollectiveWork,
        course: _Course,
        *,
        elsewhere: bool = False,
        blocks: bool = True,
    ) -> bool:
        """Whether the call has ended: else, without `blocks`, it goes on where it was left.

        `elsewhere`: not in the caller's stream.
        """
        if self._error is not None:
            work.finish(self._error)
            return True
        try:
            if not course.has_begun:
                self._prepare(call)
            # The caller's modes are not those of another thread, nor are they always the tensors'.
            inference = course.in_inference or _are_inference(work)
            with torch.inference_mode() if inference else _NO_MODE:
                if not course.go_on(blocks=blocks):
                    return False
        except Exception as error:
            work.finish(self._fail(call, error))
        else:
            self._last = call
            work.finish(enqueued=self._stream.end_of(course.algorithm) if elsewhere else None)
        return True

    def _prepare(self, call: Call) -> None:
        self._links.check()
        if not self._met:
            # Ascending everywhere, so that no two wait for each other in a circle.
            for rank in sorted({*self.layout.neighbours, *self.layout.team}):
                self._links.to(rank)
            self._met = True
        self._exchange.tag = call.tag
        # NCCL's kernels would wait for the CPU; there the deadline finds what differs.
        if self.layout.team and self.device.type == "cpu":
            self._exchange.compare_inside().wait()

    def _fail(self, call: Call, error: Exception) -> CollectiveError:
        """Tell the others, hear them, and end the group."""
        own = Statement(
            rank=self.layout.rank,
            state=IN_A_CALL,
            call=call,
            error=str(error),
        )
        own = self._blackboard.state(own, alarm=True)
        self._release()
        if self._error is None:
            text = self._explained(self._blackboard.collect(own), own)
            self._error = CollectiveError(text)
            self._error.__cause__ = error
        return self._error

    def _explained(self, heard: Heard, own: Statement) -> str:
        return explain(self.name, self.layout, heard, own=own, timeout=self.timeout)

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
            heard = self._blackboard.collect(own)
            self._error = CollectiveError(self._explained(heard, own))
            self._release()

    def _look_in_a_call(self) -> None:
        """Give up a wait for this vendor's library once another rank's call has failed."""
        self._require_health()
        if self._blackboard.alarmed():
            raise RuntimeError("another rank's call failed meanwhile")

    def _state(self, state: str, *, alarm: bool = False, error: str = "") -> Statement:
        own = Statement(rank=self.layout.rank, state=state, call=self._last, error=error)
        return self._blackboard.state(own, alarm=alarm)
