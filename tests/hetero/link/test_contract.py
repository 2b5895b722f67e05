"""The contract that every transport keeps, checked between two real processes: what arrives.

Each scenario is what both sides do; the test below it says what must come of it. How a link fails
and ends is in test_contract_failures.py.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections import deque
from dataclasses import asdict
from typing import Any

import pytest
import torch

from hetero.link.base import Work
from hetero.link.header import _DTYPES
from tests.forked_ranks import values
from tests.hetero.link.contract import Pair, Scenario, Side, blank, make, same_bits
from tests.hetero.link.joined import wait_for
from tests.hetero.link.transports import SLOWNESS, Transport, of_this_machine, why_absent

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


@pytest.mark.parametrize("absent", of_this_machine(present=False))
def test_the_whole_contract(absent: Transport) -> None:
    """One line for each transport that is left out, not one for each test of it."""
    pytest.skip(f"not checked: {why_absent(absent)}")


def numbered(side: Side) -> list[int]:
    count = 200
    if side.rank == 0:
        works = [side.link.send(torch.tensor([n], device=side.device)) for n in range(count)]
        for work in works:
            work.wait()
        return []
    targets = [torch.full((1,), -1, device=side.device) for _ in range(count)]
    for work in [side.link.recv(target) for target in targets]:
        work.wait()
    return [int(target) for target in targets]


def test_messages_arrive_in_the_order_sent_and_exactly_once(pair: Pair) -> None:
    _, received = values(pair.run(numbered))
    assert received == list(range(200))


def every_dtype(side: Side) -> dict[str, torch.Tensor]:
    return {
        str(dtype): make((3, 5), dtype, side.device, seed=seed)
        for seed, dtype in enumerate(_DTYPES)
    }


def every_size(side: Side) -> dict[str, torch.Tensor]:
    return {
        name: make(shape, torch.float32, side.device, seed=seed)
        for seed, (name, shape) in enumerate(SIZES.items())
    }


def any_strides_and_history(side: Side) -> dict[str, torch.Tensor]:
    base = make((6, 8, 4), torch.float32, side.device, seed=1)
    return {
        "transposed": base.transpose(0, 2),
        "every other": base[::2, 1::3],
        "expanded": base[:1].expand(5, 8, 4),
        "a slice of larger memory": base[2:4],
        "needs gradients": base.clone().requires_grad_(),
        "an activation": base.clone().requires_grad_() * 2,
    }


def lazy_views(side: Side) -> dict[str, torch.Tensor]:
    base = make((4, 4), torch.complex64, side.device, seed=3).nan_to_num(0.0, 0.0, 0.0)
    return {"conjugated": base.conj(), "negated": base[:1, :1].conj().imag}


def arrivals(side: Side) -> dict[str, bool]:
    """Which of the sources arrive bit for bit."""
    arrived = {}
    for name, source in side.options["sources"](side).items():
        if side.rank == 0:
            side.link.send(source).wait()
        else:
            target = blank(source).requires_grad_(source.requires_grad)
            side.link.recv(target).wait()
            arrived[name] = same_bits(target, source)
    return arrived


@pytest.mark.parametrize("sources", [every_dtype, every_size, any_strides_and_history, lazy_views])
def test_a_source_arrives_bit_for_bit(pair: Pair, sources: Any) -> None:
    _, arrived = values(pair.run(arrivals, sources=sources))
    assert len(arrived) > 1
    assert set(arrived.values()) == {True}, arrived


def one_gibibyte(side: Side) -> bool:
    sent = torch.arange(1 << 28, dtype=torch.int32, device=side.device)
    if side.rank == 0:
        side.link.send(sent).wait()
        side.hear("compared")
        return True
    target = torch.empty_like(sent)
    side.link.recv(target).wait()
    is_whole = torch.equal(target, sent)
    side.say("compared")
    return is_whole


@pytest.mark.slow
def test_a_gibibyte_arrives_whole(pair: Pair) -> None:
    assert values(pair.run(one_gibibyte, timeout=120, patience=240)) == [True, True]


def into_strides(side: Side) -> list[str]:
    errors = []
    try:
        side.link.recv(torch.empty(4, 6, device=side.device).t())
    except ValueError as error:
        errors.append(str(error))
    # The refused request has taken no message.
    tensor = torch.full((2,), float(side.rank), device=side.device)
    target = torch.empty(2, device=side.device)
    works = [side.link.send(tensor), side.link.recv(target)]
    for work in works:
        work.wait()
    return [*errors, str(target.tolist())]


def test_a_target_that_is_not_contiguous_is_refused_at_once(pair: Pair) -> None:
    for rank, (error, received) in enumerate(values(pair.run(into_strides))):
        assert "contiguous" in error
        assert "(6, 4)" in error
        assert received == str([1.0 - rank] * 2)


def both_ways(side: Side) -> bool:
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
    return all(same_bits(t, e) for t, e in zip(targets, expected, strict=True))


def test_many_messages_fly_both_ways_at_once(transport: Transport, pair: Pair) -> None:
    if not transport.has_deadlines and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        pytest.skip(
            f"the kernels of {transport} wait for each other in the one hardware queue that "
            "CUDA_DEVICE_MAX_CONNECTIONS=1 leaves, and hang"
        )
    assert values(pair.run(both_ways)) == [True, True]


def two_sides_that_both_send_first_do_not_wait_for_each_other(side: Side) -> bool:
    sent = make((4 << 20,), torch.uint8, side.device, seed=side.rank)
    expected = make((4 << 20,), torch.uint8, side.device, seed=side.peer)
    for _ in range(4):
        target = blank(expected)
        first = side.link.send(sent)
        side.link.recv(target).wait()
        first.wait()
        if not same_bits(target, expected):
            return False
    return True


# Whose memory it is, and when.


def returns_at_once(side: Side) -> dict[str, Any]:
    tensor = torch.ones(1 << 20, device=side.device)
    if not side.transport.has_header:
        # A vendor library connects in the first call.
        (side.link.send(tensor) if side.rank == 0 else side.link.recv(tensor)).wait()
    side.meet("ready")
    if side.rank == 1:
        side.hear("posted")
        side.link.recv(tensor).wait()
        return {}
    begin = time.perf_counter()
    work = side.link.send(tensor)
    seconds = time.perf_counter() - begin
    side.say("posted")
    work.wait()
    return {"seconds": seconds, "is_done": wait_for(work.is_completed, seconds=120)}


def test_send_returns_before_the_peer_asks_and_done_follows(pair: Pair) -> None:
    sender, _ = values(pair.run(returns_at_once))
    assert sender["seconds"] < 1.0 * SLOWNESS
    assert sender["is_done"]


def a_sender_may_drop_its_tensor_at_once(side: Side) -> bool:
    shape = (1 << 18,)
    if side.rank == 0:
        tensors = [make(shape, torch.int32, side.device, seed=seed) for seed in range(8)]
        while tensors:
            side.link.send(tensors.pop(0))
        gc.collect()
        # Whoever gets the freed memory writes over it.
        for _ in range(16):
            torch.full(shape, -1, dtype=torch.int32, device=side.device)
        side.say("dropped")
        side.hear("compared")
        return True
    side.hear("dropped")
    arrived = True
    for seed in range(8):
        expected = make(shape, torch.int32, side.device, seed=seed)
        target = blank(expected)
        side.link.recv(target).wait()
        arrived = arrived and same_bits(target, expected)
    side.say("compared")
    return arrived


def a_sender_may_overwrite_its_tensor_after_wait(side: Side) -> bool:
    expected = make((1 << 18,), torch.int32, side.device, seed=1)
    if side.rank == 0:
        work = side.link.send(expected)
        work.wait()
        expected.zero_()
        return True
    target = blank(expected)
    time.sleep(0.2)
    side.link.recv(target).wait()
    return same_bits(target, expected)


def counted(side: Side) -> dict[str, float]:
    for _ in range(3):
        tensor = torch.ones(5, 2, device=side.device)
        (side.link.send(tensor) if side.rank == 0 else side.link.recv(tensor)).wait()
    return asdict(side.link.counters)


def test_the_counters_count_tensor_bytes_and_messages(pair: Pair) -> None:
    sender, receiver = values(pair.run(counted))
    assert (sender["messages_sent"], sender["bytes_sent"]) == (3, 120)
    assert (sender["messages_received"], sender["bytes_received"]) == (0, 0)
    assert (receiver["messages_received"], receiver["bytes_received"]) == (3, 120)


def a_tensor_s_memory_outlives_what_its_owner_makes_of_it(side: Side) -> bool:
    """As a pipeline does, which gives an output's memory back as soon as it has been sent."""
    size = (300_000,)
    messages = [make(size, torch.uint8, side.device, seed=n) for n in range(20)]
    works, noise, kept = [], [], {}
    for number, message in enumerate(messages):
        if side.rank == 0:
            tensor = message.clone()
            works.append(side.link.send(tensor))
        else:
            tensor = torch.zeros_like(message)
            works.append(side.link.recv(tensor))
            if number % 2:
                kept[number] = tensor.detach()
        tensor.data = torch.empty((1,), dtype=torch.uint8, device=side.device)
        # What would be allocated in its place.
        noise.append(torch.full(size, 77, dtype=torch.uint8, device=side.device))
    for work in works:
        work.wait()
    arrived = all(torch.equal(tensor, messages[number]) for number, tensor in kept.items())
    return arrived and all(bool((tensor == 77).all()) for tensor in noise)


def a_fork_ends_well_while_a_message_is_under_way(side: Side) -> bool:
    """As a data loader starts its workers. A fork that frees a GPU's event is aborted."""
    expected = make((1 << 18,), torch.int32, side.device, seed=1)
    target = blank(expected)
    if side.rank == 0:
        side.hear("forked")
        work = side.link.send(expected)
    else:
        work = side.link.recv(target)
    if (child := os.fork()) == 0:
        os._exit(0)
    has_ended_well = os.waitpid(child, 0)[1] == 0
    if side.rank == 1:
        side.say("forked")
    work.wait()
    return has_ended_well and (side.rank == 0 or same_bits(target, expected))


@pytest.mark.parametrize(
    "scenario",
    [
        two_sides_that_both_send_first_do_not_wait_for_each_other,
        a_fork_ends_well_while_a_message_is_under_way,
        a_sender_may_drop_its_tensor_at_once,
        a_sender_may_overwrite_its_tensor_after_wait,
        a_tensor_s_memory_outlives_what_its_owner_makes_of_it,
    ],
)
def test_all_arrives_unchanged_and(pair: Pair, scenario: Scenario) -> None:
    assert values(pair.run(scenario)) == [True, True]


def soaked(side: Side) -> dict[str, int]:
    """Random sizes both ways at once, a window of them in flight, every byte compared."""
    count, window, largest = side.options["count"], 64, 64 << 10
    ours, theirs = random.Random(side.rank), random.Random(side.peer)
    noise = [make((largest,), torch.uint8, side.device, seed=r) for r in (side.rank, side.peer)]
    flights: deque[tuple[Work, Work, torch.Tensor, torch.Tensor]] = deque()
    compared = 0

    def land() -> None:
        sent, received, target, expected = flights.popleft()
        received.wait()
        sent.wait()
        assert torch.equal(target, expected)

    for _ in range(count):
        first, size = ours.randrange(largest // 2), ours.randrange(largest // 2)
        peer_first, peer_size = theirs.randrange(largest // 2), theirs.randrange(largest // 2)
        source = noise[0][first : first + size]
        expected = noise[1][peer_first : peer_first + peer_size]
        target = torch.empty_like(expected)
        flights.append((side.link.send(source), side.link.recv(target), target, expected))
        if len(flights) == window:
            land()
            compared += 1
    while flights:
        land()
        compared += 1
    return {"compared": compared, "received": side.link.counters.messages_received}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_thousand_messages_arrive_once_and_unchanged(pair: Pair) -> None:
    outcomes = pair.run(soaked, timeout=60, patience=850, count=100_000)
    assert values(outcomes) == [{"compared": 100_000, "received": 100_000}] * 2
