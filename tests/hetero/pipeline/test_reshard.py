"""An edge between stages of different layouts: what one stage sends is what the other receives.

Where tensor-parallel ranks gather, real processes are needed: see tests/distributed/test_meshes.py.
"""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import product
from typing import cast

import pytest
import torch

from hetero.link.base import Link
from hetero.pipeline.reshard import End, ReshardedEdge
from hetero.plan.plan import Layout
from tests.hetero.pipeline.fake_link import FakeLink

SEQUENCE, HIDDEN = 8, 3


def edges(source: Layout, target: Layout) -> tuple[list[ReshardedEdge], list[ReshardedEdge]]:
    """What every rank of both stages has."""
    queues: dict[tuple[bool, int, int], deque[torch.Tensor]] = defaultdict(deque)

    def of(own: Layout, other: Layout, *, is_source: bool) -> list[ReshardedEdge]:
        found = []
        for place in range(own.ranks):
            end = End(own, other, place=place, sequence=SEQUENCE)
            links = {
                peer: cast(
                    Link,
                    FakeLink(queues[is_source, place, peer], queues[not is_source, peer, place]),
                )
                for peer in end.peers()
            }
            found.append(ReshardedEdge(end, links, tensor_group=None))
        return found

    return of(source, target, is_source=True), of(target, source, is_source=False)


def held(layout: Layout, rank: int, whole: torch.Tensor) -> torch.Tensor:
    """What a rank has of a tensor that its stage splits by replicas and by parts of sequences."""
    batch = layout.batch_of(rank)
    rows = whole.shape[0] // layout.tensor
    first = rank % layout.tensor * rows
    return whole[first : first + rows, batch.start : batch.stop].contiguous()


SHAPES = [(t, d) for t, d in product((1, 2, 4), (1, 2, 4)) if t * d <= 4]


@pytest.mark.parametrize(("source", "target"), product(SHAPES, SHAPES))
def test_activations_and_gradients_arrive_whole(
    source: tuple[int, int], target: tuple[int, int]
) -> None:
    batch = 4
    layouts = [Layout(t, d, batch // d, sequence_parallel=t > 1) for t, d in (source, target)]
    for scale in (1, 2):  # Evaluation may take more sequences in a step.
        layout = [
            Layout(x.tensor, x.data, scale * x.micro_batch_size, x.sequence_parallel)
            for x in layouts
        ]
        whole = torch.randn(SEQUENCE, scale * batch, HIDDEN)
        here, there = edges(*layouts)
        for senders, receivers, sent, taken in (
            (here, there, *layout),
            (there, here, *layout[::-1]),
        ):
            for rank, edge in enumerate(senders):
                edge.send(held(sent, rank, whole)).wait()
            for rank, edge in enumerate(receivers):
                expected = held(taken, rank, whole)
                tensor = torch.empty_like(expected, requires_grad=True)
                work = edge.recv(tensor)
                assert not work.is_completed()
                work.wait()
                work.wait()  # As the schedules may.
                assert work.is_completed()
                assert torch.equal(tensor, expected)
                assert tensor.is_leaf


def test_a_rank_has_links_to_those_alone_that_it_exchanges_something_with() -> None:
    here, there = edges(Layout(2, 2, 2, True), Layout(1, 4, 1))
    assert [len(edge.links) for edge in here] == [2, 2, 2, 2]
    assert [len(edge.links) for edge in there] == [2, 2, 2, 2]
