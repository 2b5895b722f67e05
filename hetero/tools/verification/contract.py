"""The contract that every link keeps, as clauses that two processes play over any transport.

Both processes call the same clause, each with its own `Side`. A clause returns what was not as the
contract has it, one sentence each; it raises what the link raises. `hetero verify` plays them
between two nodes, the tests between two processes.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hetero.errors import LinkError
from hetero.link.base import Link, Work, as_bytes, sendable
from hetero.link.header import DTYPES

MESSAGES = 200
"""That are numbered."""
SIZES: dict[str, tuple[int, ...]] = {
    "0 bytes": (0,),
    "0 bytes of three dimensions": (3, 0, 2),
    "1 element": (1,),
    "0 dimensions": (),
    "8 dimensions": (1, 2, 1, 3, 1, 1, 2, 1),
    "odd": (4099,),
    "odd in every dimension": (7, 3, 1021),
    "one over a page": (1025,),
    "16 MiB": (4 << 20,),
    "16 MiB and a byte's worth": ((4 << 20) + 1,),
}
SOAK_WINDOW, SOAK_LARGEST = 64, 64 << 10


@dataclass(kw_only=True)
class Side:
    """What a clause has: one end of a link, and a store to meet the other end."""

    rank: int
    peer: int
    store: dist.Store
    """Of this clause alone."""
    device: torch.device
    opener: Callable[[float], Link]
    """Opens one more link of this timeout to the other end. Collective between the two."""
    sends: bool
    """Whether this end sends where one end sends and the other receives."""
    timeout: float
    """Of the links that are opened from now on."""
    grace: float = 8.0
    """Seconds after the timeout within which an error must be known."""
    patience: float = 60.0
    options: Mapping[str, Any] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)

    @property
    def link(self) -> Link:
        """The link of this side, opened when it is first asked for."""
        return self.links[-1] if self.links else self.open()

    def open(self) -> Link:
        self.links.append(self.opener(self.timeout))
        return self.links[-1]

    def close(self) -> None:
        for link in self.links:
            link.close()

    def say(self, what: str) -> None:
        self.store.set(what, "1")

    def hear(self, what: str, seconds: float | None = None) -> None:
        self.store.wait([what], timedelta(seconds=self.patience if seconds is None else seconds))

    def meet(self, where: str) -> None:
        """Go on when the other side is here too."""
        self.say(f"{where}/{self.rank}")
        self.hear(f"{where}/{self.peer}")


Clause = Callable[[Side], list[str]]


def make(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, seed: int
) -> torch.Tensor:
    """A tensor of random bits, NaNs and all, the same for one seed in every process."""
    itemsize = torch.empty((), dtype=dtype).element_size()
    count = itemsize * int(torch.Size(shape).numel())
    high = 2 if dtype is torch.bool else 256
    generator = torch.Generator().manual_seed(seed)
    content = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
    return content.view(dtype).reshape(shape).to(device)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    left, right = (as_bytes(sendable(tensor).cpu()) for tensor in (one, other))
    return torch.equal(left, right)


def blank(like: torch.Tensor) -> torch.Tensor:
    """Where `like` can be received: contiguous, and visibly not yet received."""
    target = torch.zeros(like.numel() * like.itemsize, dtype=torch.uint8, device=like.device)
    return target.view(like.dtype).reshape(like.shape)


# What arrives.


def messages_arrive_in_order_and_once(side: Side) -> list[str]:
    if side.sends:
        works = [side.link.send(torch.tensor([n], device=side.device)) for n in range(MESSAGES)]
        for work in works:
            work.wait()
        return []
    targets = [torch.full((1,), -1, device=side.device) for _ in range(MESSAGES)]
    for work in [side.link.recv(target) for target in targets]:
        work.wait()
    received = [int(target) for target in targets]
    wrong = [number for number in range(MESSAGES) if received[number] != number]
    if not wrong:
        return []
    first = wrong[0]
    return [f"message {first} of {MESSAGES} is number {received[first]}; {len(wrong)} are wrong"]


def every_dtype(device: torch.device) -> dict[str, torch.Tensor]:
    return {str(dtype): make((3, 5), dtype, device, seed=seed) for seed, dtype in enumerate(DTYPES)}


def every_size(device: torch.device) -> dict[str, torch.Tensor]:
    return {
        name: make(shape, torch.float32, device, seed=seed)
        for seed, (name, shape) in enumerate(SIZES.items())
    }


def any_strides_and_history(device: torch.device) -> dict[str, torch.Tensor]:
    base = make((6, 8, 4), torch.float32, device, seed=1)
    return {
        "transposed": base.transpose(0, 2),
        "every other": base[::2, 1::3],
        "expanded": base[:1].expand(5, 8, 4),
        "a slice of larger memory": base[2:4],
        "needs gradients": base.clone().requires_grad_(),
        "an activation": base.clone().requires_grad_() * 2,
    }


def lazy_views(device: torch.device) -> dict[str, torch.Tensor]:
    base = make((4, 4), torch.complex64, device, seed=3).nan_to_num(0.0, 0.0, 0.0)
    return {"conjugated": base.conj(), "negated": base[:1, :1].conj().imag}


Sources = Callable[[torch.device], dict[str, torch.Tensor]]


def arrives_bit_for_bit(sources: Sources, side: Side) -> list[str]:
    """Each of the sources, one after the other."""
    changed = []
    for name, source in sources(side.device).items():
        if side.sends:
            side.link.send(source).wait()
            continue
        target = blank(source).requires_grad_(source.requires_grad)
        side.link.recv(target).wait()
        if not same_bits(target, source):
            changed.append(f"{name} arrived changed")
    return changed


def many_messages_fly_both_ways_at_once(side: Side) -> list[str]:
    shapes = [(n * 37 % 50_000,) for n in range(60)]
    outgoing = [make(s, torch.bfloat16, side.device, seed=2 * n) for n, s in enumerate(shapes)]
    expected = [make(s, torch.bfloat16, side.device, seed=2 * n) for n, s in enumerate(shapes)]
    targets = [blank(tensor) for tensor in expected]
    works: list[Work] = []
    # Both send everything before either asks for anything.
    works += [side.link.send(tensor) for tensor in outgoing]
    works += [side.link.recv(target) for target in targets]
    for work in reversed(works):
        work.wait()
    changed = [n for n in range(len(shapes)) if not same_bits(targets[n], expected[n])]
    return [f"{len(changed)} of {len(shapes)} messages arrived changed"] if changed else []


def both_may_send_before_either_receives(side: Side) -> list[str]:
    sent = make((4 << 20,), torch.uint8, side.device, seed=side.rank)
    expected = make((4 << 20,), torch.uint8, side.device, seed=side.peer)
    for number in range(4):
        target = blank(expected)
        first = side.link.send(sent)
        side.link.recv(target).wait()
        first.wait()
        if not same_bits(target, expected):
            return [f"message {number} of 4 MiB arrived changed"]
    return []


def random_sizes_arrive_unchanged(side: Side) -> list[str]:
    """Both ways at once, a window of them in flight, every byte compared."""
    count = side.options.get("count", 2000)
    ours, theirs = random.Random(side.rank), random.Random(side.peer)
    noise = [
        make((SOAK_LARGEST,), torch.uint8, side.device, seed=r) for r in (side.rank, side.peer)
    ]
    flights: deque[tuple[Work, Work, torch.Tensor, torch.Tensor]] = deque()
    changed = 0

    def land() -> int:
        sent, received, target, expected = flights.popleft()
        received.wait()
        sent.wait()
        return int(not torch.equal(target, expected))

    for _ in range(count):
        first, size = (ours.randrange(SOAK_LARGEST // 2) for _ in range(2))
        peer_first, peer_size = (theirs.randrange(SOAK_LARGEST // 2) for _ in range(2))
        source = noise[0][first : first + size]
        expected = noise[1][peer_first : peer_first + peer_size]
        target = torch.empty_like(expected)
        flights.append((side.link.send(source), side.link.recv(target), target, expected))
        if len(flights) == SOAK_WINDOW:
            changed += land()
    while flights:
        changed += land()
    received = side.link.counters.messages_received
    problems = [f"{changed} of {count} messages arrived changed"] if changed else []
    if received != count:
        problems.append(f"the link counts {received} messages instead of {count}")
    return problems


# How it fails and ends.


def failure_of(action: Callable[[], object]) -> tuple[str, float]:
    """The LinkError of an action, and after how many seconds it came."""
    begin = time.monotonic()
    try:
        action()
    except LinkError as error:
        return str(error), time.monotonic() - begin
    return "nothing was raised", time.monotonic() - begin


def names_both_ends(link: Link, text: str) -> bool:
    ends = str(link.description).removeprefix("link ").split(" - ")
    return all(end in text for end in ends)


def _unlike(link: Link, text: str, *, expected: str) -> list[str]:
    """What an error lacks: the names of both ends, and a phrase."""
    if names_both_ends(link, text) and expected in text:
        return []
    return [f"the error should name both ends and say {expected!r}; it says {text!r}"]


class Message(NamedTuple):
    shape: tuple[int, ...] = (4, 3)
    dtype: torch.dtype = torch.float32
    tag: int = 0


DIFFERENCES = {
    "dtype": (Message(), Message(dtype=torch.int32), "torch.float32 instead of torch.int32"),
    "width": (Message(), Message(dtype=torch.bfloat16), "torch.float32 instead of torch.bfloat16"),
    "shape": (Message(), Message((3, 4)), "(4, 3) instead of (3, 4)"),
    "dimensions": (Message(), Message((12,)), "(4, 3) instead of (12,)"),
    "larger": (Message(), Message((2, 3)), "(4, 3) instead of (2, 3)"),
    "smaller": (Message(), Message((8, 3)), "(4, 3) instead of (8, 3)"),
    "tag": (Message(tag=2**32 - 1), Message(tag=7), "tag 4294967295 instead of 7"),
}


def a_receiver_is_told_what_differs(side: Side) -> list[str]:
    """Over a link for each difference: a link fails but once."""
    problems = []
    for what, (sent, asked, difference) in DIFFERENCES.items():
        shape, dtype, tag = sent if side.sends else asked
        tensor = torch.ones(shape, device=side.device).to(dtype)
        link = side.open()
        if side.sends:
            link.send(tensor, tag=tag)
        else:
            text, seconds = failure_of(partial(_receive, link, tensor, tag))
            problems += _unlike(link, text, expected=difference)
            if seconds >= side.timeout:
                problems.append(f"{what}: the error came after {seconds:.1f} s")
        side.meet(what)
    return problems


def _receive(link: Link, tensor: torch.Tensor, tag: int) -> None:
    link.recv(tensor, tag=tag).wait()


def a_message_that_never_comes_is_an_error_in_time(side: Side) -> list[str]:
    if side.sends:
        side.hear("gave up")
        return []
    tensor = torch.zeros(4, device=side.device)
    text, seconds = failure_of(lambda: side.link.recv(tensor).wait())
    problems = _unlike(side.link, text, expected="")
    if not 0.9 * side.timeout <= seconds < side.timeout + side.grace:
        problems.append(f"it came after {seconds:.1f} s; the timeout is {side.timeout:g} s")
    again, _ = failure_of(lambda: side.link.recv(tensor).wait())
    if str(side.link.description).removeprefix("link ").split(" - ")[0] not in again:
        problems.append(f"a link that failed once has to stay failed; it says {again!r}")
    side.say("gave up")
    return problems


def a_peer_that_closes_is_an_error_within_seconds(side: Side) -> list[str]:
    tensor = torch.ones(1 << 18, device=side.device)
    if side.sends:
        side.link.send(tensor).wait()
        side.hear("received")
        side.link.close()
        text, _ = failure_of(lambda: side.link.send(tensor))
        side.hear("gave up")
        return _unlike(side.link, text, expected="closed")
    side.link.recv(tensor).wait()
    side.say("received")
    text, seconds = failure_of(lambda: side.link.recv(tensor).wait())
    side.say("gave up")
    problems = _unlike(side.link, text, expected="")
    if seconds >= side.grace + 2.0:
        problems.append(f"the error came after {seconds:.1f} s")
    return problems


SHORT = 2.0
"""The timeout of links whose transfers must fail."""


class Rule(NamedTuple):
    """A clause, and whether it needs links of a short timeout."""

    clause: Clause
    fails: bool = False


CONTRACT: dict[str, Rule] = {
    "in order and once": Rule(messages_arrive_in_order_and_once),
    "every dtype": Rule(partial(arrives_bit_for_bit, every_dtype)),
    "every size": Rule(partial(arrives_bit_for_bit, every_size)),
    "strides and gradients": Rule(partial(arrives_bit_for_bit, any_strides_and_history)),
    "lazy views": Rule(partial(arrives_bit_for_bit, lazy_views)),
    "many both ways": Rule(many_messages_fly_both_ways_at_once),
    "both send first": Rule(both_may_send_before_either_receives),
    "random sizes": Rule(random_sizes_arrive_unchanged),
    "mismatches": Rule(a_receiver_is_told_what_differs),
    "deadline": Rule(a_message_that_never_comes_is_an_error_in_time, fails=True),
    "peer closes": Rule(a_peer_that_closes_is_an_error_within_seconds),
}
"""What `hetero verify` plays. Resources, forks and processor time are for the tests alone."""
