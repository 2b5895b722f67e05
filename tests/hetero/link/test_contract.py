"""The contract that every transport keeps, checked between two real processes: what arrives.

Each scenario is what both sides do; the test below it says what must come of it. How a link fails
and ends is in test_contract_failures.py.
"""

from __future__ import annotations

import gc
import os
import time
from dataclasses import asdict

import pytest
import torch

from hetero.tools.verification import contract
from hetero.tools.verification.contract import CONTRACT, blank, make, same_bits
from tests.forked_ranks import values
from tests.hetero.link.contract import Pair, Scenario, Side
from tests.hetero.link.joined import wait_for
from tests.hetero.link.transports import Transport, of_this_machine, why_absent

ARRIVALS = [
    *("in order and once", "every dtype", "every size", "strides and gradients", "lazy views"),
    *("both send first", "random sizes"),
]
"""Clauses that ask nothing of a transport."""


@pytest.mark.parametrize("absent", of_this_machine(present=False))
def test_the_whole_contract(absent: Transport) -> None:
    """One line for each transport that is left out, not one for each test of it."""
    pytest.skip(f"not checked: {why_absent(absent)}")


@pytest.mark.parametrize("name", ARRIVALS)
def test_what_is_sent_arrives(pair: Pair, name: str) -> None:
    assert values(pair.run(CONTRACT[name].clause)) == [[], []]


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


def test_many_messages_fly_both_ways_at_once(transport: Transport, pair: Pair) -> None:
    if not transport.has_deadlines and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        pytest.skip(
            f"the kernels of {transport} wait for each other in the one hardware queue that "
            "CUDA_DEVICE_MAX_CONNECTIONS=1 leaves, and hang"
        )
    assert values(pair.run(contract.many_messages_fly_both_ways_at_once)) == [[], []]


# Whose memory it is, and when.


def returns_at_once(side: Side) -> bool:
    tensor = torch.ones(1 << 20, device=side.device)
    if not side.transport.has_header:
        # A vendor library connects in the first call.
        (side.link.send(tensor) if side.rank == 0 else side.link.recv(tensor)).wait()
    side.meet("ready")
    if side.rank == 1:
        side.hear("posted")
        side.link.recv(tensor).wait()
        return True
    work = side.link.send(tensor)
    # Only now does the peer ask.
    side.say("posted")
    work.wait()
    return wait_for(work.is_completed, seconds=120)


def test_send_returns_before_the_peer_asks_and_done_follows(pair: Pair) -> None:
    assert values(pair.run(returns_at_once)) == [True, True]


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
        a_fork_ends_well_while_a_message_is_under_way,
        a_sender_may_drop_its_tensor_at_once,
        a_sender_may_overwrite_its_tensor_after_wait,
        a_tensor_s_memory_outlives_what_its_owner_makes_of_it,
    ],
)
def test_all_arrives_unchanged_and(pair: Pair, scenario: Scenario) -> None:
    assert values(pair.run(scenario)) == [True, True]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_thousand_messages_arrive_once_and_unchanged(pair: Pair) -> None:
    scenario = contract.random_sizes_arrive_unchanged
    assert values(pair.run(scenario, timeout=60, patience=850, count=100_000)) == [[], []]
