"""The order in which the steps of a call's chunks run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hetero.collectives.schedule import overlapped


@given(st.integers(0, 7), st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_each_chunk_s_steps_come_in_order_and_by_so_many_chunks_later(
    count: int, gaps: list[int]
) -> None:
    lags = [sum(gaps[:number]) for number in range(len(gaps))]
    done: list[tuple[int, int]] = []

    def step(number: int) -> Any:
        def run(chunk: int) -> Iterator[Any]:
            done.append((chunk, number))
            yield from ()

        return run

    list(overlapped(range(count), [(lag, step(n)) for n, lag in enumerate(lags)]))
    assert sorted(done) == [(chunk, n) for chunk in range(count) for n in range(len(lags))]
    place = {entry: position for position, entry in enumerate(done)}
    for chunk in range(count):
        assert [n for c, n in done if c == chunk] == list(range(len(lags)))
        for number, lag in enumerate(lags):
            if chunk + lag < count:
                assert place[chunk + lag, 0] < place[chunk, number] or lag == 0
