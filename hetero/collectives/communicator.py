"""One rank's part in a group of several vendors: runs its calls in order, and handles failures.

Knows nothing of c10d's process groups. A call is an algorithm: schedule.py states the contract.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hetero.collectives.failures import (
    ABORTED,
    IDLE,
    IN_A_CALL,
    LEFT,
    POLL_SECONDS,
    RankStatus,
    Statuses,
    explain,
)
from hetero.collectives.layout import Layout, Member
from hetero.collectives.links import Links, clone
from hetero.collectives.p2p import CpuP2P, GpuP2P
from hetero.collectives.schedule import Algorithm, CallContext
from hetero.collectives.vendor_library import VendorLibrary, name_backend, new_library
from hetero.collectives.work import (
    Call,
    CollectiveError,
    CollectiveWork,
    RunningCall,
    SideStream,
    Worker,
)
from hetero.errors import LinkError, print_line
from hetero.link.base import Link, dtype_name
from hetero.observe.record import CallEntry, GroupEntry, recorder

_CLOSE_SECONDS = 5.0
_CATCH_UP_SECONDS = 1e-3
"""How long a caller lets the worker finish earlier calls before it submits another one. Two
threads that both use torch take Python's lock from each other, up to 5 ms each time."""
_CPU_P2P_SECONDS = 365 * 24 * 3600.0
"""The timeout of a link for messages of CPU tensors: in effect none, because each message has its
own deadline. `wait()` on its handle fails after the group's timeout, and a receive may be posted
again after that over the same link, which therefore must not fail with it. What waits ends with
the group, or once the peer has exited: `_check_peer` raises while a link opens, and an open link
fails by itself.
"""


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A method of the group as a callback of its own parts, which must not keep the group alive.

    Else its memory and files stay until garbage is collected, which a script may have switched off,
    or which frees a GPU's events in a forked process, and so aborts it.
    """
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        if (bound := reference()) is not None:
            bound(*arguments)

    return call


class Communicator:
    """The calls of one group, for tensors of one device.

    Building it is collective. `store` is this group's own. Its threads share the connection: a wait
    of one would block the others, so they poll.
    """

    def __init__(
        self,
        *,
        layout: Layout,
        name: str,
        store: dist.Store,
        device: torch.device,
        timeout: timedelta,
        has_exited: Callable[[Member], bool],
        announcement: str = "",
    ) -> None:
        """
        Args:
            has_exited: whether a member's process has, as liveness knows.
            announcement: printed, with the transport, once links to other vendors are open.
        """
        self.layout, self.name, self.device = layout, name, device
        self._announcement = announcement
        # Calls of both kinds of devices are numbered from 1.
        self._recorded_name = name if device.type == "cpu" else f"{name} (GPU)"
        self.timeout = timeout.total_seconds()
        self._statuses = Statuses(store, layout, has_exited=has_exited)
        self._has_exited: Callable[[int], bool] = lambda rank: has_exited(layout.members[rank])
        self._library: VendorLibrary | None = None
        if len(layout.vendor_ranks) > 1:
            backend = new_library(
                device.type,
                dist.PrefixStore(f"vendor {layout.vendor}/", store),
                layout,
                timeout=timeout,
            )
            inside = f"{self._recorded_name} within {layout.members[layout.rank].vendor}"
            name_backend(backend, device, inside)
            recorder().add_group(
                GroupEntry(
                    name=inside,
                    ranks=tuple(layout.members[rank].global_rank for rank in layout.vendor_ranks),
                    backend="gloo" if device.type == "cpu" else "nccl",
                )
            )
            check_abort = _weakly(self._check_abort) if device.type == "cpu" else None
            self._library = VendorLibrary(backend, timeout=timeout, check_abort=check_abort)
        self._links = Links(
            layout=layout,
            store=dist.PrefixStore("links/", store),
            device=device,
            timeout=self.timeout,
            check_abort=_weakly(self._check_abort_or_peer),
            has_exited=self._has_exited,
        )
        self._context = CallContext(
            layout=layout, library=self._library, links=self._links, device=device
        )
        self._stream = SideStream(device)
        self._p2p = self._new_p2p(store)
        self.sequence = 0
        """Calls so far."""
        self._messages: Counter[tuple[str, int | None, int]] = Counter()
        """Sends and receives so far, by peer and tag."""
        self._recorder = recorder()
        self._recorder.add_group(
            GroupEntry(
                name=self._recorded_name,
                ranks=tuple(member.global_rank for member in layout.members),
                backend="hetero",
            )
        )
        self._submission = threading.Lock()
        self._last_call: Call | None = None
        self._error: CollectiveError | None = None
        self._is_connected = False
        # A group may be dropped without shutdown, as after an abort, and must not live on here.
        poll = _weakly(self._poll_failures)
        self._worker = Worker(f"{name} calls", poll=poll, seconds=POLL_SECONDS)
        # A script need not destroy its groups, and Python aborts a process at whose exit a thread
        # is in PyTorch's C++, as the worker is while it polls the store.
        weakref.finalize(self, self._worker.close, seconds=_CLOSE_SECONDS)

    def describe(self, description: str) -> None:
        """Tell the recorder what the group is for; the same on all of its ranks."""
        known = self._recorder.groups[self._recorded_name]
        self._recorder.add_group(replace(known, description=description))

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later calls. Point-to-point messages of GPUs keep the first one."""
        self.timeout = timeout.total_seconds()

    def _new_p2p(self, store: dist.Store) -> CpuP2P | GpuP2P:
        on_cpu = self.device.type == "cpu"
        # NCCL waits in the store during its first call, and messages have to get through meanwhile.
        store = dist.PrefixStore("p2p/", store if on_cpu else clone(store))
        links = Links(
            layout=self.layout,
            store=store,
            device=self.device,
            timeout=_CPU_P2P_SECONDS if on_cpu else self.timeout,
            check_abort=_weakly(self._check_peer),
            has_exited=self._has_exited,
        )
        if on_cpu:
            return CpuP2P(layout=self.layout, links=links)
        return GpuP2P(rank=self.layout.rank, links=links, device=self.device)

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
        timeout: float | None = None,
    ) -> CollectiveWork | None:
        """Run one call of the group, after those before it.

        Args:
            tensors: what the work's future holds.
            common: tensors whose dtype and numbers of elements must be the same on all ranks.
            root: in the group.
            blocking: whether the caller waits at once. The call then needs no handle: it is done
                (on a GPU: enqueued in the caller's stream) when this returns None, and raises its
                error. This is also what PyTorch expects of a group.
            timeout: of this call, in seconds; the group's if None. For CPU tensors only: transfers
                of earlier calls may still be under way on a GPU, and a link has one timeout.
        """
        self._stream.require_no_capture()
        with self._submission:
            self.sequence += 1
            dtype = dtype_name((common or tensors)[0].dtype)
            call = Call(
                self.sequence,
                operation,
                dtype if common else "",
                tuple([tensor.numel() for tensor in common]),
                reduction,
                None if root is None else self.layout.members[root].global_rank,
            )
            entry = CallEntry(
                self._recorded_name,
                self.sequence,
                operation,
                dtype,
                tuple([tensor.shape for tensor in tensors]),
                call.root,
                reduction,
                timeout=self.timeout if timeout is None else timeout,
            )
            self._recorder.add_call(entry)
            running = RunningCall(
                call,
                entry,
                algorithm,
                self._context,
                in_inference_mode=any(map(torch.Tensor.is_inference, tensors)),
            )
            may_start_here = self._error is None and (
                blocking or (self._is_connected and self._stream.exists)
            )
            starts_here = may_start_here and self._worker.try_acquire(seconds=_CATCH_UP_SECONDS)
            if not (starts_here and blocking):
                running.work = CollectiveWork(
                    call, tensors, timeout=entry.timeout, group=self.name, entry=entry
                )
            if starts_here:
                try:
                    if blocking:
                        self._progress(running)
                    else:
                        self._start_in_callers_thread(running)
                finally:
                    self._worker.release()
            elif self._error is not None:
                running.finish(self._error)
            else:
                event = self._stream.record_event()
                self._worker.submit(lambda: self._run_on_side_stream(running, event))
        if running.work is not None:
            self._worker.run_pending()
            if not blocking:
                return running.work
            running.work.wait()
        elif running.error is not None:
            raise running.error
        return None

    def _start_in_callers_thread(self, running: RunningCall) -> None:
        """Progress a GPU's call as far as no peer has to come first; leave the rest to the worker.

        A peer thus delays the caller by one poll at most. This order keeps the rule that prevents
        deadlocks (docs/ring.md), which is about the order in which work is enqueued and not about
        the thread: links enqueue no wait before the work that satisfies it, and calls stay in
        order.
        """
        running.in_inference_mode |= torch.is_inference_mode_enabled()
        self._stream.wait_event(self._stream.record_event())
        with self._stream.as_current():
            is_done = self._progress(running, on_side_stream=True, blocking=False)
        if not is_done:
            self._worker.submit(lambda: self._run_on_side_stream(running, None))

    def _run_on_side_stream(self, running: RunningCall, event: torch.cuda.Event | None) -> None:
        """Run a call in the worker's thread, after the caller's `event`."""
        try:
            self._stream.wait_event(event)
            with self._stream.as_current():
                self._progress(running, on_side_stream=True)
        except Exception as error:  # the GPU's own, after which no call of it works
            running.finish(self._fail(running, error))

    def links(self) -> list[Link]:
        """The links to ranks of other vendors that its collectives have opened so far."""
        return self._links.inter_vendor()

    def check(self) -> None:
        """Raise the error of the group, or of a link, if one has failed. Call it between calls."""
        self._raise_if_failed()
        self._links.check()

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error

    def drain(self, timeout: float | None = None) -> None:
        """Block until all calls so far are enqueued, and a GPU has done them."""
        seconds = self.timeout if timeout is None else timeout
        drained = CollectiveWork("the calls so far", [], timeout=seconds, group=self.name)
        self._worker.submit(drained.finish)
        self._worker.run_pending()
        drained.wait()
        self._stream.synchronize()

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> CollectiveWork:
        work: Any = self._p2p_work("send to", rank, tag, tensor)
        if self._error is not None:
            work.finish(self._error)
        else:
            self._p2p.send(tensor, rank, tag, work)
        return work

    def recv(
        self,
        memory: torch.Tensor,
        rank: int | None,
        tag: int,
        on_received: Callable[[], None],
        *,
        target: torch.Tensor,
    ) -> CollectiveWork:
        """Receive into contiguous `memory`; `on_received` copies from there into `target`."""
        work: Any = self._p2p_work("receive from", rank, tag, memory, recorded=target)
        if self._error is not None:
            work.finish(self._error)
        else:
            self._p2p.recv(memory, rank, tag, work, on_received)
        return work

    def _p2p_work(
        self,
        verb: str,
        rank: int | None,
        tag: int,
        tensor: torch.Tensor,
        *,
        recorded: torch.Tensor | None = None,
    ) -> CollectiveWork:
        """`recorded`: the tensor whose size the record shows, if it is not the handle's."""
        self._stream.require_no_capture()
        peer = "any rank" if rank is None else str(self.layout.members[rank])
        own = self.layout.members[self.layout.rank]
        what = f"{verb} {peer} by {own} with tag {tag}"
        work: CollectiveWork = self._p2p.new_work(
            what, [tensor], timeout=self.timeout, group=self.name
        )
        shown = tensor if recorded is None else recorded
        operation = "send" if verb.startswith("send") else "recv"
        self._messages[operation, rank, tag] += 1
        work.entry = CallEntry(
            self._recorded_name,
            self._messages[operation, rank, tag],
            operation,
            dtype_name(shown.dtype),
            (shown.shape,),
            None if rank is None else self.layout.members[rank].global_rank,
            tag=tag,
            timeout=self.timeout,
        )
        self._recorder.add_call(work.entry)
        return work

    def abort(self, reason: str = "") -> None:
        """End all calls in flight with an error, here and by that on the other ranks."""
        if self._error is None:
            why = f" ({reason})" if reason else ""
            self._error = CollectiveError(f"group {self.name} was aborted{why}; make a new one")
            self._submit_status(ABORTED, error=reason)
        self._abort_calls()
        self._abort_messages()

    def shutdown(self) -> None:
        """Leave the group once the calls in flight have ended. Later ones fail at once."""
        self._worker.close(seconds=self.timeout)
        if self._error is None:  # else this rank's status says in which call it failed
            self._submit_status(LEFT)
            self._error = CollectiveError(
                f"group {self.name} was destroyed; make a new one, and build anew what uses it"
            )
        self._p2p.close(self._error)
        self._links.close()
        if self._library is not None:
            self._library.shutdown()

    def _progress(
        self, running: RunningCall, *, on_side_stream: bool = False, blocking: bool = True
    ) -> bool:
        """Progress a call in the current stream, to its end if `blocking`; returns True at its end.

        `on_side_stream`: the current stream is not the caller's.
        """
        if self._error is not None:
            running.finish(self._error)
            return True
        try:
            if not running.is_started:
                self._prepare(running)
            if running.in_inference_mode:
                with torch.inference_mode():
                    is_done = running.progress(blocking=blocking)
            else:
                is_done = running.progress(blocking=blocking)
            if not is_done:
                return False
            held = [running.algorithm] if on_side_stream and self._stream.exists else None
            end = None if held is None else self._stream.record_end(held)
        except Exception as error:
            running.finish(self._fail(running, error))
            return True
        self._last_call = running.call
        stream = None if held is None else self._stream.stream
        running.finish(end_event=end, stream=stream, held=held)
        return True

    def _prepare(self, running: RunningCall) -> None:
        """Before a call starts: set its timeout and tag, open links, and compare tags."""
        self._links.check()
        seconds = running.timeout
        if seconds != self._links.timeout:
            self._links.set_timeout(seconds)
            if self._library is not None:
                self._library.timeout = timedelta(seconds=seconds)
        if not self._is_connected:
            # Connect in ascending order on every rank, so that no cycle of ranks can form.
            for rank in sorted({*self.layout.inter_vendor_peers, *self.layout.intra_vendor_peers}):
                self._links.to(rank)
            self._is_connected = True
            if self._announcement:
                print_line(f"{self._announcement} over {self._links.inter_vendor()[0].transport}")
        self._context.tag = running.call.tag
        # Not on a GPU, where it would make the CPU wait; the timeout finds different calls there.
        if self.layout.intra_vendor_peers and self.device.type == "cpu":
            self._context.compare_tags_within_vendor()

    def _fail(self, running: RunningCall, error: Exception) -> CollectiveError:
        """Report this rank's error, collect the other ranks' errors, and fail the group."""
        own = RankStatus(self.layout.rank, IN_A_CALL, running.call, error=str(error))
        self._statuses.submit(own)
        self._recorder.report_failure(f"{running.call} of group {self.name} failed: {error}")
        self._abort_calls()
        if self._error is None:
            self._error = self._explained(own, timeout=running.timeout)
            self._error.__cause__ = error
        self._abort_messages()
        return self._error

    def _explained(self, own: RankStatus, *, timeout: float) -> CollectiveError:
        report = self._statuses.collect(own)
        return CollectiveError(explain(self.name, self.layout, report, own=own, timeout=timeout))

    def _abort_calls(self) -> None:
        """Fail what other ranks wait for, so that their calls fail too and they report it."""
        with contextlib.suppress(Exception):
            if self._library is not None:
                self._library.abort()
        with contextlib.suppress(Exception):
            self._links.close()

    def _abort_messages(self) -> None:
        """End the messages under way with the group's error, once it is known."""
        with contextlib.suppress(Exception):
            self._p2p.close(self._error)

    def _poll_failures(self) -> None:
        """Fail the group, between calls, if another rank's call or a link of a GPU has failed."""
        if self._error is not None:
            return
        problem = ""
        try:
            self._links.check()
        except LinkError as error:
            problem = str(error)
        if problem or self._statuses.has_failure():
            self._recorder.report_failure(
                f"group {self.name} failed: {problem or 'another rank reported a failure'}"
            )
            own = self._submit_status(IDLE, error=problem)
            self._error = self._explained(own, timeout=self.timeout)
            self._abort_calls()
            self._abort_messages()

    def _check_abort(self) -> None:
        """Raise, during a call, once another rank's call has failed."""
        self._raise_if_failed()
        if self._statuses.has_failure():
            raise RuntimeError("another rank's call failed meanwhile")

    def _check_abort_or_peer(self, rank: int) -> None:
        self._check_abort()
        self._check_peer(rank)

    def _check_peer(self, rank: int) -> None:
        """Raise, while a peer is waited for, once the group has failed or the peer has gone."""
        self._raise_if_failed()
        member = self.layout.members[rank]
        if self._statuses.has_gone(member):
            raise LinkError(f"{member} has exited or left the group; see its log")

    def _submit_status(self, state: str, *, error: str = "") -> RankStatus:
        own = RankStatus(rank=self.layout.rank, state=state, call=self._last_call, error=error)
        self._statuses.submit(own)
        return own
