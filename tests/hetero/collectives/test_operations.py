"""Every operation in every form, for every dtype and reduction, against a reference.

One set of processes for each shape of the group walks all the cases.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from tests.forked_ranks import values
from tests.hetero.collectives import references as ref
from tests.hetero.collectives.ranks import (
    FOUR_AND_FOUR,
    IN_TURN,
    THREE_AND_ONE,
    TWO_AND_TWO,
    Side,
    run_ranks,
)

SHAPES = [
    pytest.param(("nvidia", "amd"), id="1+1"),
    pytest.param(TWO_AND_TWO, id="2+2"),
    pytest.param(THREE_AND_ONE, id="3+1"),
    pytest.param(IN_TURN, id="2+3 in turn", marks=pytest.mark.slow),
    pytest.param(FOUR_AND_FOUR, id="4+4", marks=pytest.mark.slow),
]
# One element; odd, so that no vendor gets equal parts; large enough for shards and several chunks.
ONE, ODD = (1,), (7, 3)
LARGE = (600_001,)
ALL_REDUCTIONS = (*ref.REDUCTIONS, "PREMUL_SUM")


@pytest.mark.parametrize("vendors", SHAPES)
def test_every_operation_gives_what_one_process_would(vendors):
    digests = values(run_ranks(walk_all, vendors))
    assert all(other == digests[0] for other in digests), "the ranks hold different bits"
    assert len(digests[0]) > 80


def walk_all(side: Side) -> dict[str, str]:
    """Runs every case; the digests of what every rank has alike, by the case's name."""
    digests: dict[str, str] = {}
    for dtype in ref.DTYPES:
        for name in ALL_REDUCTIONS:
            if not ref.exists(name, dtype):
                _refused(name, dtype)
                continue
            check_reductions(side, name, dtype, ODD, digests)
        check_copies(side, dtype, ODD)
    for dtype, name in ((torch.float32, "SUM"), (torch.bfloat16, "AVG"), (torch.int64, "MAX")):
        for shape in (ONE, LARGE):
            check_reductions(side, name, dtype, shape, digests)
            check_copies(side, dtype, shape)
    check_coalesced(side)
    check_strided(side)
    _shared_places(side)
    _inference_tensors(side)
    _saved_tensors(side)
    _fake_tensors(side)
    _wrapped_tensors(side)
    check_uneven(side)
    check_objects(side)
    _point_to_point(side)
    _from_any_rank_of_a_part(side)
    _handles(side)
    check_empty(side)
    return digests


def _refused(name: str, dtype: torch.dtype) -> None:
    # Of complex tensors torch itself refuses some.
    with pytest.raises((RuntimeError, ValueError), match=r"no reduction|not support"):
        dist.all_reduce(torch.ones(2).to(dtype), op=ref.op_of(name))


def check_reductions(
    side: Side, name: str, dtype: torch.dtype, shape: tuple[int, ...], digests: dict[str, str]
) -> None:
    op, ranks = ref.op_of(name), range(side.size)
    what = f"{name} of {dtype} {shape}"
    inputs = [ref.given(rank, shape, dtype, seed=1) for rank in ranks]
    expected = ref.reduced(name, inputs)
    first, again = inputs[side.rank].clone(), inputs[side.rank].clone()
    dist.all_reduce(first, op=op)
    dist.all_reduce(again, op=op)
    ref.assert_near(first, expected, f"all_reduce {what}")
    assert ref.digest(first) == ref.digest(again), f"a repeat of all_reduce {what} differs"
    digests[what] = ref.digest(first)
    root = len(what) % side.size
    mine = inputs[side.rank].clone()
    dist.reduce(mine, dst=root, op=op)
    if side.rank == root:
        ref.assert_near(mine, expected, f"reduce {what}")
    else:
        assert torch.equal(mine, inputs[side.rank]), f"reduce {what} changed an input"
    given = [ref.given(side.rank, shape, dtype, seed=2 + to) for to in ranks]
    expected = ref.reduced(name, [ref.given(r, shape, dtype, seed=2 + side.rank) for r in ranks])
    output = torch.empty(shape, dtype=dtype)
    dist.reduce_scatter(output, given, op=op)
    ref.assert_near(output, expected, f"reduce_scatter {what}")
    output = torch.empty(shape, dtype=dtype)
    whole = torch.cat(given)
    dist.reduce_scatter_tensor(output, whole, op=op)
    ref.assert_near(output, expected, f"reduce_scatter_tensor {what}")
    row = whole.chunk(side.size)[side.rank]
    dist.reduce_scatter_tensor(row, whole, op=op)
    ref.assert_near(row, expected, f"reduce_scatter_tensor {what} in place")


def check_copies(side: Side, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    ranks, what = range(side.size), f"{dtype} {shape}"
    inputs = [ref.given(rank, shape, dtype, seed=20) for rank in ranks]
    mine = inputs[side.rank]
    blank = [torch.zeros(shape, dtype=dtype) for _ in ranks]
    dist.all_gather(blank, mine)
    _assert_same(blank, inputs, f"all_gather {what}")
    blank = [mine.clone(), *(torch.zeros_like(mine) for _ in ranks[1:])]
    dist.all_gather(blank, blank[0])
    _assert_same(blank, inputs, f"all_gather {what} of what takes rank 0's")
    whole = torch.zeros((side.size * shape[0], *shape[1:]), dtype=dtype)
    dist.all_gather_into_tensor(whole, mine)
    _assert_same([whole], [torch.cat(inputs)], f"all_gather_into_tensor {what}")
    whole.zero_()
    row = whole.chunk(side.size)[side.rank].copy_(mine)
    dist.all_gather_into_tensor(whole, row)
    _assert_same([whole], [torch.cat(inputs)], f"all_gather_into_tensor {what} in place")
    for root in (0, side.size - 1):
        target = mine.clone()
        dist.broadcast(target, src=root)
        _assert_same([target], [inputs[root]], f"broadcast {what}")
        blank = [torch.zeros(shape, dtype=dtype) for _ in ranks]
        dist.gather(mine, blank if side.rank == root else None, dst=root)
        if side.rank == root:
            _assert_same(blank, inputs, f"gather {what}")
        target = torch.zeros(shape, dtype=dtype)
        dist.scatter(target, inputs if side.rank == root else None, src=root)
        _assert_same([target], [mine], f"scatter {what}")
    given = [ref.given(side.rank, shape, dtype, seed=30 + to) for to in ranks]
    expected = [ref.given(r, shape, dtype, seed=30 + side.rank) for r in ranks]
    blank = [torch.zeros(shape, dtype=dtype) for _ in ranks]
    dist.all_to_all(blank, given)
    _assert_same(blank, expected, f"all_to_all {what}")
    whole = torch.zeros_like(whole)
    dist.all_to_all_single(whole, torch.cat(given))
    _assert_same([whole], [torch.cat(expected)], f"all_to_all_single {what}")


def _assert_same(got: list[torch.Tensor], expected: list[torch.Tensor], what: str) -> None:
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other), what


def check_coalesced(side: Side) -> None:
    ranks = range(side.size)
    sizes = ((3,), (40_000,), (2, 5))
    inputs = [[ref.given(r, s, torch.float32, seed=40) for s in sizes] for r in ranks]
    mine = [tensor.clone() for tensor in inputs[side.rank]]
    dist.all_reduce_coalesced(mine, op=dist.ReduceOp.SUM)
    for index, tensor in enumerate(mine):
        expected = ref.reduced("SUM", [inputs[r][index] for r in ranks])
        ref.assert_near(tensor, expected, "all_reduce_coalesced")
    outputs = [[torch.zeros(s) for s in sizes] for _ in ranks]
    dist.all_gather_coalesced(outputs, inputs[side.rank])
    _assert_same(
        list(itertools.chain(*outputs)), list(itertools.chain(*inputs)), "all_gather_coalesced"
    )
    with dist._coalescing_manager(async_ops=True) as handle:
        tensors = [tensor.clone() for tensor in inputs[side.rank]]
        for tensor in tensors:
            dist.all_reduce(tensor)
    handle.wait()
    _assert_same(tensors, mine, "all_reduce in a coalescing manager")
    either, total = torch.zeros(2, dtype=torch.bool), torch.zeros(2)
    with dist._coalescing_manager(async_ops=False):
        for output in (either, total):
            dist.reduce_scatter_tensor(output, torch.ones(2 * side.size, dtype=output.dtype))
    assert either.all()
    assert (total == side.size).all(), "reduce_scatter of several dtypes"
    wholes = [torch.zeros(side.size * s[0], *s[1:]) for s in sizes]
    with dist._coalescing_manager(async_ops=False):
        for whole, tensor in zip(wholes, inputs[side.rank], strict=True):
            dist.all_gather_into_tensor(whole, tensor)
    expected = [torch.cat([inputs[r][i] for r in ranks]) for i in range(len(sizes))]
    _assert_same(wholes, expected, "all_gather_into_tensor in a coalescing manager")


def check_strided(side: Side) -> None:
    """Tensors that are not contiguous, and scalars."""
    ranks = range(side.size)
    inputs = [ref.given(r, (4, 6), torch.float64, seed=50) for r in ranks]
    for view in (lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[0, 0]):
        whole = inputs[side.rank].clone()
        dist.all_reduce(view(whole))
        ref.assert_near(view(whole), ref.reduced("SUM", [view(t) for t in inputs]), "strided")
        whole = inputs[side.rank].clone()
        dist.broadcast(view(whole), src=side.size - 1)
        assert torch.equal(view(whole), view(inputs[-1])), "strided broadcast"
        outputs = [view(torch.zeros(4, 6, dtype=torch.float64)) for _ in ranks]
        dist.all_gather(outputs, view(inputs[side.rank]))
        _assert_same(outputs, [view(t) for t in inputs], "strided all_gather")


def _shared_places(side: Side) -> None:
    """What expand() gives takes no result, and is sent like anything else."""
    spread = torch.full((1,), float(side.rank)).expand(4)
    results = [torch.zeros(1).expand(4) for _ in range(side.size)]
    before = (side.rank - 1) % side.size
    for call in (
        lambda: dist.all_reduce(spread),
        lambda: dist.all_gather(results, torch.zeros(4)),
        lambda: dist.recv(spread, before),
    ):
        with pytest.raises(ValueError, match="lie in one place"):
            call()
    last = side.size - 1
    given = spread if side.rank == last else torch.zeros(4)
    dist.broadcast(given, src=last)
    assert (given == last).all()
    results = [torch.zeros(4) for _ in range(side.size)]
    dist.all_gather(results, spread)
    _assert_same(results, [torch.full((4,), float(r)) for r in range(side.size)], "of expand()")


def _inference_tensors(side: Side) -> None:
    """A script makes its tensors in inference mode, and leaves it before the call."""
    with torch.inference_mode():
        total, output = torch.ones(4), torch.zeros(side.size)
    for _ in range(2):
        dist.all_reduce(total)
    assert (total == side.size**2).all()
    for is_async in (False, True):
        given = torch.full((side.size,), float(side.rank))
        work = dist.all_to_all_single(output, given, async_op=is_async)
        if work is not None:
            work.wait()
        _assert_same([output], [torch.arange(float(side.size))], "to an inference tensor")


def _saved_tensors(side: Side) -> None:
    """What autograd has saved for backward may be a call's result, as over PyTorch's groups."""
    before, after = (side.rank - 1) % side.size, (side.rank + 1) % side.size
    for size in (side.size, 20_000 * side.size):
        whole, own = torch.ones(size), torch.ones(size // side.size)
        calls = (
            dist.all_reduce,
            lambda result: dist.broadcast(result, src=side.size - 1),
            lambda result: dist.reduce(result, dst=0),
            lambda result, own=own: dist.all_gather_into_tensor(result, own),
            lambda result, whole=whole: dist.all_to_all_single(result, whole),
            lambda result, whole=whole: (dist.isend(whole, after), dist.recv(result, before)),
        )
        for call in calls:
            given = torch.ones(size, requires_grad=True)
            result = torch.relu(given)
            call(result)
            result.sum().backward()
            assert torch.equal(given.grad, torch.ones(size))


def _fake_tensors(side: Side) -> None:
    """Calls of models that have no memory, or of tools that estimate it, do nothing."""
    for without_memory in (FakeTensorMode(), torch.device("meta")):
        with without_memory:
            tensor = torch.ones(4)
            dist.all_reduce(tensor)
            dist.all_gather([torch.ones(4) for _ in range(side.size)], tensor)
            dist.send(tensor, (side.rank + 1) % side.size)
            dist.recv(tensor, (side.rank + 1) % side.size)


def _wrapped_tensors(side: Side) -> None:
    """Those of functional collectives are waited for; what has no memory otherwise is refused."""
    ranks = range(side.size)
    given = [ref.given(rank, (3,), torch.float64, seed=70) for rank in ranks]
    for broadcast_from in ranks:
        result = functional.broadcast(given[side.rank], broadcast_from, dist.group.WORLD)
        outputs = [torch.zeros(3, dtype=torch.float64) for _ in ranks]
        dist.all_gather(outputs, result)
        _assert_same(outputs, [given[broadcast_from]] * side.size, "of a functional collective")
    mesh = DeviceMesh("cpu", list(ranks))
    with pytest.raises(ValueError, match=r"a DTensor has no memory.* to_local\(\)"):
        dist.all_reduce(DTensor.from_local(torch.ones(3), mesh, [Replicate()], run_check=False))


def check_uneven(side: Side) -> None:
    """Each rank has another size."""
    ranks = range(side.size)
    rows = [[(3 * r + to) % 4 for to in ranks] for r in ranks]
    tables = [ref.given(r, (sum(rows[r]), 5), torch.float32, seed=60) for r in ranks]
    taken = [rows[r][side.rank] for r in ranks]
    output = torch.zeros(sum(taken), 5)
    dist.all_to_all_single(output, tables[side.rank], taken, rows[side.rank])
    expected = torch.cat([tables[r].split(rows[r])[side.rank] for r in ranks])
    _assert_same([output], [expected], "all_to_all_single with splits")
    outputs = [torch.zeros(r + 1, 2) for r in ranks]
    inputs = [ref.given(r, (r + 1, 2), torch.float32, seed=61) for r in ranks]
    dist.all_gather(outputs, inputs[side.rank])
    _assert_same(outputs, inputs, "all_gather of unequal sizes")
    parts = [[ref.given(r, (to + 1,), torch.float64, seed=62 + to) for to in ranks] for r in ranks]
    output = torch.zeros(side.rank + 1, dtype=torch.float64)
    dist.reduce_scatter(output, parts[side.rank])
    expected = ref.reduced("SUM", [part[side.rank] for part in parts])
    ref.assert_near(output, expected, "reduce_scatter of unequal sizes")


def check_objects(side: Side) -> None:
    gathered = [None] * side.size
    dist.all_gather_object(gathered, {"rank": side.rank, "text": "x" * side.rank})
    assert gathered == [{"rank": r, "text": "x" * r} for r in range(side.size)]
    shared = [side.rank, "mine"] if side.rank == 1 else [None, None]
    dist.broadcast_object_list(shared, src=1)
    assert shared == [1, "mine"]
    given = [f"for {r}" for r in range(side.size)] if side.rank == 0 else None
    taken = [None]
    dist.scatter_object_list(taken, given, src=0)
    assert taken == [f"for {side.rank}"]
    last = side.size - 1
    gathered = [None] * side.size if side.rank == last else None
    dist.gather_object(side.rank, gathered, dst=last)
    assert gathered == (list(range(side.size)) if side.rank == last else None)


def _point_to_point(side: Side) -> None:
    """Tags out of order, any source, batches, and large messages both ways at once."""
    after, before = (side.rank + 1) % side.size, (side.rank - 1) % side.size
    sent = [dist.isend(torch.full((5,), 10.0 * tag + side.rank), after, tag=tag) for tag in (3, 4)]
    for tag in (4, 3):
        received = torch.zeros(5)
        assert dist.recv(received, before, tag=tag) == before
        assert (received == 10.0 * tag + before).all()
    for work in sent:
        work.wait()
    large = torch.full((1 << 20,), float(side.rank))
    received = torch.zeros(1 << 20)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, large, after), dist.P2POp(dist.irecv, received, before)]
    )
    for work in works:
        work.wait()
    assert (received == before).all()
    if side.rank:
        sent = [dist.isend(torch.tensor([side.rank + tag]), 0, tag=tag) for tag in (3, 4)]
        for work in sent:
            work.wait()
        return
    number = torch.zeros(1, dtype=torch.int64)
    for tag in (4, 3):
        sources = []
        for _ in range(side.size - 1):
            sources.append(dist.recv(number, tag=tag))
            assert number.item() == sources[-1] + tag
        assert sorted(sources) == list(range(1, side.size))


def _from_any_rank_of_a_part(side: Side) -> None:
    """The sender is named by its rank in the whole, whatever it is in the part."""
    first, last = (side.size - 1) // 2, side.size - 1
    part = dist.new_group([first, last])
    number = torch.full((1,), float(side.rank))
    if side.rank == last:
        dist.send(number, first, group=part)
    elif side.rank == first:
        assert dist.recv(number, group=part) == last
        assert number.item() == last


def _handles(side: Side) -> None:
    """Handles end in any order of waiting, and their futures hold the result."""
    tensors = [torch.full((1000,), float(side.rank + i)) for i in range(8)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    total = sum(range(side.size))
    (value,) = works[-1].get_future().then(lambda future: future.value()).wait()
    assert (value == total + side.size * 7).all()
    for i, work in reversed(list(enumerate(works))):
        assert work.wait()
        assert work.is_completed()
        assert (tensors[i] == total + side.size * i).all()


def check_empty(side: Side) -> None:
    """Empty inputs must not hang."""
    dist.all_reduce(torch.zeros(0))
    dist.broadcast(torch.zeros(0), src=0)
    outputs = [torch.zeros(0) for _ in range(side.size)]
    dist.all_gather(outputs, torch.zeros(0))
    dist.barrier()
