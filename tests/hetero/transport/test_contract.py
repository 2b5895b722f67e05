"""The contract that every transport keeps, checked between two real processes.

Each scenario is what both sides do; the test below it says what must come of it.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections import deque
from functools import partial
from typing import Any

import pytest
import torch

from hetero.errors import LinkError
from hetero.transport.base import Work
from hetero.transport.header import _DTYPES
from tests.hetero.transport.contract import (
    JOB,
    Outcome,
    Resources,
    Side,
    blank,
    make,
    run_pair,
    same_bits,
    values,
)
from tests.hetero.transport.transports import SLOWNESS, TRANSPORTS, Transport

SHORT = 1.0 * SLOWNESS
"""The deadline of links whose transfers must fail."""
GRACE = 8.0 * SLOWNESS
"""Within this after the deadline the failure must be known."""
AMPLE = 8.0 * SLOWNESS
"""The deadline where a message crosses before the failure is known, on a busy machine too."""

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


def _lacks(transport: Transport) -> str | None:
    """Why this machine cannot run a transport."""
    if transport.device == "cuda" and torch.cuda.device_count() < 2:
        return f"{transport} needs two GPUs; this machine has {torch.cuda.device_count()}"
    return None


def _params(*, present: bool) -> list[Any]:
    return [
        pytest.param(t, id=str(t), marks=[pytest.mark.gpu] if t.device == "cuda" else [])
        for t in TRANSPORTS
        if (_lacks(t) is None) == present
    ]


@pytest.mark.parametrize("absent", _params(present=False))
def test_the_whole_contract(absent: Transport) -> None:
    """One line for each transport that is left out, not one for each test of it."""
    pytest.skip(f"not checked: {_lacks(absent)}")


@pytest.fixture(params=_params(present=True))
def transport(request: pytest.FixtureRequest) -> Transport:
    chosen: Transport = request.param
    return chosen


@pytest.fixture
def header_transport(transport: Transport) -> Transport:
    if not transport.has_header:
        pytest.skip(f"{transport} sends no header, so it cannot see that the two sides differ")
    return transport


# What arrives.


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


def test_messages_arrive_in_the_order_sent_and_exactly_once(transport: Transport) -> None:
    _, received = values(run_pair(numbered, transport))
    assert received == list(range(200))


def every_dtype(side: Side) -> dict[str, bool]:
    arrived = {}
    for seed, dtype in enumerate(_DTYPES):
        sent = make((3, 5), dtype, side.device, seed=seed)
        if side.rank == 0:
            side.link.send(sent).wait()
        else:
            target = blank(sent)
            side.link.recv(target).wait()
            arrived[str(dtype)] = same_bits(target, sent)
    return arrived


def test_every_dtype_of_the_protocol_arrives_bit_for_bit(transport: Transport) -> None:
    _, arrived = values(run_pair(every_dtype, transport))
    assert arrived == {str(dtype): True for dtype in _DTYPES}


def every_size(side: Side) -> dict[str, bool]:
    arrived = {}
    for seed, (name, shape) in enumerate(SIZES.items()):
        sent = make(shape, torch.float32, side.device, seed=seed)
        if side.rank == 0:
            side.link.send(sent).wait()
        else:
            target = blank(sent)
            side.link.recv(target).wait()
            arrived[name] = same_bits(target, sent)
    return arrived


def test_every_size_arrives_bit_for_bit(transport: Transport) -> None:
    _, arrived = values(run_pair(every_size, transport))
    assert arrived == dict.fromkeys(SIZES, True)


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
def test_a_gibibyte_arrives_whole(transport: Transport) -> None:
    assert values(run_pair(one_gibibyte, transport, timeout=120, patience=240)) == [True, True]


def any_strides(side: Side) -> dict[str, bool]:
    base = make((6, 8, 4), torch.float32, side.device, seed=1)
    sources = {
        "transposed": base.transpose(0, 2),
        "every other": base[::2, 1::3],
        "expanded": base[:1].expand(5, 8, 4),
        "a slice of larger memory": base[2:4],
        "needs gradients": base.clone().requires_grad_(),
        "an activation": base.clone().requires_grad_() * 2,
    }
    arrived = {}
    for name, source in sources.items():
        if side.rank == 0:
            side.link.send(source).wait()
        else:
            target = torch.empty(source.shape, device=side.device, requires_grad=True)
            side.link.recv(target).wait()
            arrived[name] = same_bits(target, source)
    return arrived


def test_a_source_may_have_any_strides_and_a_history(transport: Transport) -> None:
    _, arrived = values(run_pair(any_strides, transport))
    assert set(arrived.values()) == {True}, arrived


def lazy_views(side: Side) -> dict[str, bool]:
    base = make((4, 4), torch.complex64, side.device, seed=3).nan_to_num(0.0, 0.0, 0.0)
    sources = {"conjugated": base.conj(), "negated": base[:1, :1].conj().imag}
    arrived = {}
    for name, source in sources.items():
        if side.rank == 0:
            side.link.send(source).wait()
        else:
            target = torch.empty(source.shape, dtype=source.dtype, device=side.device)
            side.link.recv(target).wait()
            arrived[name] = torch.equal(target, source)
    return arrived


def test_a_lazily_conjugated_source_arrives_as_its_values(transport: Transport) -> None:
    _, arrived = values(run_pair(lazy_views, transport))
    assert arrived == {"conjugated": True, "negated": True}


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


def test_a_target_that_is_not_contiguous_is_refused_at_once(transport: Transport) -> None:
    for rank, (error, received) in enumerate(values(run_pair(into_strides, transport))):
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


def test_many_messages_fly_both_ways_at_once(transport: Transport) -> None:
    if not transport.has_deadlines and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        pytest.skip(
            f"the kernels of {transport} wait for each other in the one hardware queue that "
            "CUDA_DEVICE_MAX_CONNECTIONS=1 leaves, and hang"
        )
    assert values(run_pair(both_ways, transport)) == [True, True]


def large_both_ways(side: Side) -> bool:
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


def test_two_sides_that_both_send_first_do_not_wait_for_each_other(transport: Transport) -> None:
    assert values(run_pair(large_both_ways, transport)) == [True, True]


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
    deadline = time.monotonic() + 10
    while not work.done() and time.monotonic() < deadline:
        time.sleep(0.01)
    return {"seconds": seconds, "is_done": work.done()}


def test_send_returns_before_the_peer_asks_and_done_follows(transport: Transport) -> None:
    sender, _ = values(run_pair(returns_at_once, transport))
    assert sender["seconds"] < 1.0 * SLOWNESS
    assert sender["is_done"]


def dropped(side: Side) -> bool:
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


def test_a_sender_may_drop_its_tensor_at_once(transport: Transport) -> None:
    assert values(run_pair(dropped, transport)) == [True, True]


def overwritten(side: Side) -> bool:
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


def test_a_sender_may_overwrite_its_tensor_after_wait(transport: Transport) -> None:
    assert values(run_pair(overwritten, transport)) == [True, True]


def counted(side: Side) -> dict[str, float]:
    for _ in range(3):
        tensor = torch.ones(5, 2, device=side.device)
        (side.link.send(tensor) if side.rank == 0 else side.link.recv(tensor)).wait()
    return side.link.counters.as_dict()


def test_the_counters_count_tensor_bytes_and_messages(transport: Transport) -> None:
    sender, receiver = values(run_pair(counted, transport))
    assert (sender["messages_sent"], sender["bytes_sent"]) == (3, 120)
    assert (sender["messages_received"], sender["bytes_received"]) == (0, 0)
    assert (receiver["messages_received"], receiver["bytes_received"]) == (3, 120)


# What goes wrong.


def _fails(action: Any) -> tuple[str, float]:
    """The LinkError of an action, and after how many seconds it came."""
    begin = time.monotonic()
    try:
        action()
    except LinkError as error:
        return str(error), time.monotonic() - begin
    return "nothing was raised", time.monotonic() - begin


def _names_the_link(text: str, *, rank: int) -> bool:
    peer = 1 - rank
    return f"rank {rank} (stage {4 + rank})" in text and f"rank {peer} (stage {4 + peer})" in text


def differing(side: Side) -> tuple[str, float]:
    shape, dtype = side.options["sides"][side.rank]
    tensor = torch.ones(shape, dtype=dtype, device=side.device)
    side.meet("ready")
    if side.rank == 0:
        return _fails(side.link.send(tensor).wait)
    return _fails(lambda: side.link.recv(tensor).wait())


FLOATS = ((4, 3), torch.float32)
DIFFERENCES = {
    "dtype": (FLOATS, ((4, 3), torch.int32), "torch.float32 instead of torch.int32"),
    "width": (FLOATS, ((4, 3), torch.bfloat16), "torch.float32 instead of torch.bfloat16"),
    "shape": (FLOATS, ((3, 4), torch.float32), "(4, 3) instead of (3, 4)"),
    "dimensions": (FLOATS, ((12,), torch.float32), "(4, 3) instead of (12,)"),
    "larger": (FLOATS, ((2, 3), torch.float32), "(4, 3) instead of (2, 3)"),
    "smaller": (FLOATS, ((8, 3), torch.float32), "(4, 3) instead of (8, 3)"),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_receiver_that_expects_something_else_is_told_what_differed(
    header_transport: Transport, what: str
) -> None:
    sent, expected, difference = DIFFERENCES[what]
    outcomes = run_pair(differing, header_transport, timeout=AMPLE, sides=(sent, expected))
    (_, _), (text, seconds) = values(outcomes)
    assert _names_the_link(text, rank=1), text
    assert difference in text
    assert seconds < AMPLE


def refused(side: Side) -> tuple[str, float]:
    tensor = torch.ones((4, 3) if side.rank == 0 else (3, 4), device=side.device)
    side.meet("ready")
    if side.rank == 1:
        return _fails(lambda: side.link.recv(tensor).wait())

    def send_until_told() -> None:
        deadline = time.monotonic() + SHORT + 2 * GRACE
        while time.monotonic() < deadline:
            work = side.link.send(tensor)
            work.wait()
            while not work.done() and time.monotonic() < deadline:
                time.sleep(0.01)

    return _fails(send_until_told)


def test_the_sender_of_a_message_that_was_refused_is_told_too(header_transport: Transport) -> None:
    """At the latest by its next request: waiting for a sent GPU tensor only orders streams."""
    (text, seconds), _ = values(run_pair(refused, header_transport, timeout=SHORT))
    assert _names_the_link(text, rank=0), text
    assert seconds < SHORT + GRACE


def of_two_jobs(side: Side) -> tuple[str, float]:
    link = side.open(job=f"{JOB} {side.rank}")
    tensor = torch.ones(4, device=side.device)
    side.meet("ready")
    use = link.send if side.rank == 0 else link.recv
    return _fails(lambda: use(tensor).wait())


def test_a_message_of_another_job_is_refused(header_transport: Transport) -> None:
    _, (text, _) = values(run_pair(of_two_jobs, header_transport, timeout=AMPLE, opened=False))
    assert _names_the_link(text, rank=1), text
    assert "job" in text


def never_sent(side: Side) -> list[tuple[str, float]]:
    if side.rank == 0:
        side.hear("gave up")
        return []
    tensor = torch.zeros(4, device=side.device)
    first = _fails(lambda: side.link.recv(tensor).wait())
    later = _fails(lambda: side.link.recv(tensor).wait())
    side.say("gave up")
    return [first, later]


def _needs_deadlines(transport: Transport) -> None:
    if not transport.has_deadlines:
        pytest.skip(f"the library of {transport} ends the process when a wait lasts too long")


def test_a_message_that_never_comes_is_an_error_in_time(transport: Transport) -> None:
    _needs_deadlines(transport)
    outcomes = run_pair(never_sent, transport, timeout=SHORT)
    (text, seconds), (later, _) = values(outcomes)[1]
    assert _names_the_link(text, rank=1), text
    assert SHORT * 0.9 <= seconds < SHORT + GRACE
    assert "rank 1 (stage 5)" in later, "a link that failed once has to stay failed"


def never_taken(side: Side) -> tuple[str, float]:
    if side.rank == 1:
        side.hear("gave up")
        return "", 0.0
    tensor = torch.zeros(32 << 20, dtype=torch.uint8)
    works = [side.link.send(tensor) for _ in range(2)]
    result = _fails(lambda: [work.wait() for work in works])
    side.say("gave up")
    return result


def test_a_message_that_is_never_taken_is_an_error_in_time(transport: Transport) -> None:
    if transport.device == "cuda":
        pytest.skip("waiting for a sent GPU tensor orders streams; the CPU learns of it later")
    (text, seconds), _ = values(run_pair(never_taken, transport, timeout=SHORT))
    assert _names_the_link(text, rank=0), text
    assert seconds < SHORT + GRACE


def killed(side: Side) -> tuple[str, float]:
    tensor = torch.zeros(1 << 20, device=side.device)
    if side.rank == 0:
        side.link.send(tensor).wait()
        side.hear("received")
        os._exit(7)
    side.link.recv(tensor).wait()
    side.say("received")
    result = _fails(lambda: side.link.recv(tensor).wait())
    if side.options["leave"]:
        side.say("end/0")
    return result


def test_a_peer_that_is_killed_is_an_error_within_seconds(transport: Transport) -> None:
    _needs_deadlines(transport)
    timeout = 30.0 * SLOWNESS
    dead, alive = run_pair(killed, transport, timeout=timeout, leave=True)
    assert dead.exit_code == 7
    text, seconds = values([alive, Outcome(exit_code=0)])[0]
    assert _names_the_link(text, rank=1), text
    assert seconds < 10.0 * SLOWNESS


# What it costs.


def idle(side: Side) -> float:
    """CPU time of the whole process, as a share of the time the link was open and idle."""
    tensor = torch.ones(1 << 18, device=side.device)
    target = torch.empty_like(tensor)
    # Everything that a link starts when it is first used has been started.
    for work in (side.link.send(tensor), side.link.recv(target)):
        work.wait()
    side.meet("used")
    begin, used = time.monotonic(), time.process_time()
    time.sleep(5)
    return (time.process_time() - used) / (time.monotonic() - begin)


def test_an_open_link_that_is_idle_uses_no_cpu(transport: Transport) -> None:
    if transport.device == "cuda":
        pytest.skip("a GPU's driver has threads of its own in the process")
    for share in values(run_pair(idle, transport)):
        assert share < 0.01 * SLOWNESS


# The end.


def closed(side: Side) -> list[str]:
    tensor = torch.ones(4, device=side.device)
    (side.link.send(tensor) if side.rank == 0 else side.link.recv(tensor)).wait()
    for _ in range(3):
        side.link.close()
    side.meet("closed")
    return [_fails(partial(request, tensor))[0] for request in (side.link.send, side.link.recv)]


def test_a_closed_link_refuses_and_may_be_closed_again(transport: Transport) -> None:
    for rank, texts in enumerate(values(run_pair(closed, transport))):
        for text in texts:
            assert _names_the_link(text, rank=rank), text
            assert "closed" in text


def let_go(side: Side) -> bool:
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


def test_a_tensor_s_memory_outlives_what_its_owner_makes_of_it(transport: Transport) -> None:
    assert values(run_pair(let_go, transport)) == [True, True]


def opened_again(side: Side) -> list[Resources]:
    held = []
    for _ in range(4):
        link = side.open()
        tensor = make((100_000,), torch.uint8, side.device, seed=1)
        target = torch.empty_like(tensor)
        works = [link.send(tensor), link.recv(target)]
        for work in works:
            work.wait()
        side.meet(f"exchanged {len(held)}")
        link.close()
        held.append(Resources.held())
        side.meet(f"closed {len(held)}")
    return held


def test_a_closed_link_leaves_nothing_behind(transport: Transport) -> None:
    """The first link may leave what a process has once: a connection, a library's thread."""
    for first, *later in values(run_pair(opened_again, transport, opened=False)):
        assert later == [first] * len(later)


def closed_under_way(side: Side) -> dict[str, Any]:
    if side.rank == 0:
        side.hear("closed")
        return {}
    before = Resources.held().threads
    work = side.link.recv(torch.zeros(4, device=side.device))
    time.sleep(0.2)
    begin = time.monotonic()
    side.link.close()
    seconds = time.monotonic() - begin
    text, waited = _fails(work.wait)
    after = Resources.held().threads
    side.say("closed")
    return {"close": seconds, "wait": waited, "text": text, "threads left": after - before}


def test_closing_ends_the_transfers_under_way(header_transport: Transport) -> None:
    _, found = values(run_pair(closed_under_way, header_transport, timeout=5 * SLOWNESS))
    assert found["close"] < 2.0 * SLOWNESS
    assert found["wait"] < 2.0 * SLOWNESS
    assert _names_the_link(found["text"], rank=1)


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
def test_a_hundred_thousand_messages_arrive_once_and_unchanged(transport: Transport) -> None:
    outcomes = run_pair(soaked, transport, timeout=60, patience=850, count=100_000)
    assert values(outcomes) == [{"compared": 100_000, "received": 100_000}] * 2
