"""Numbers and their nouns agree in all messages; ranks are listed compactly, with their nodes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from hetero.text import counted, name_ranks, ranks_on_hosts, seconds_text, size_text, spans

ROOT = Path(__file__).resolve().parents[2]
NOUNS = "ranks|meshes|connections|documents|datasets|operators|cores|pipeline stages|workers"
UNCOUNTED = re.compile(rf"\{{(?!counted\()([^{{}}]+)\}} ({NOUNS})\b")
NEVER_ONE = (
    *("outside the plan's", "none of the {world_size}", "All {count} operators"),
    *("and the {microbatches} micro batches", "cannot be shared by {stages}"),
)
"""What such a sentence holds where it is never said of one."""


@pytest.mark.parametrize(
    ("number", "words", "text"),
    [
        (1, ("rank",), "1 rank"),
        (0, ("rank",), "0 ranks"),
        (3, ("process", "processes"), "3 processes"),
    ],
)
def test_a_noun_follows_its_number(number: int, words: tuple[str, ...], text: str) -> None:
    assert counted(number, *words) == text


def test_bytes_are_written_in_the_unit_that_fits() -> None:
    counts = (1023, 1536, 1 << 20, 3 << 30, 5 << 40)
    assert [size_text(count) for count in counts] == [
        *("1023 B", "1.5 KiB", "1.0 MiB", "3.00 GiB", "5120.00 GiB")
    ]


def test_no_message_writes_a_plural_after_a_number_that_may_be_one() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for folder in ("hetero", "megatron/hetero", "bench", "examples")
        for path in ROOT.glob(f"{folder}/**/*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if UNCOUNTED.search(line) and not any(words in line for words in NEVER_ONE)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([3], "rank 3"), ([0, 1, 2, 3, 8], "ranks 0-3, 8"), ([9, 1], "ranks 1, 9")],
)
def test_numbers_are_written_compactly(numbers: list[int], text: str) -> None:
    assert spans(numbers) == text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3 on b"),
        ([0, 1, 2], "ranks 0-2 on a, b"),
        ([9], "rank 9"),
        (range(6), "ranks 0-5 on a, b, c and 1 more"),
    ],
)
def test_ranks_are_named_with_as_many_of_their_hosts_as_are_read(
    ranks: Sequence[int], text: str
) -> None:
    hosts = dict(enumerate(["a", "a", "b", "b", "c", "d"]))
    assert ranks_on_hosts(ranks, hosts) == text


@pytest.mark.parametrize(
    ("ranks", "local", "nodes", "text"),
    [
        (range(8, 16), "8", "2", "ranks 8-15 (node 1 of 2)"),
        (range(8, 32), "8", "4", "ranks 8-31 (nodes 1-3 of 4)"),
        ([1], "1", "2", "rank 1 (node 1 of 2)"),
        ([1], "2", "1", "rank 1"),
        ([2], "2", "2", "rank 2"),  # three ranks on two nodes: whose it is cannot be told
        ([1], "", "", "rank 1"),
    ],
)
def test_ranks_are_named_with_their_nodes_where_that_is_known(
    ranks: list[int], local: str, nodes: str, text: str
) -> None:
    environ = {"LOCAL_WORLD_SIZE": local, "GROUP_WORLD_SIZE": nodes}
    world = {("8", "2"): 16, ("8", "4"): 32, ("2", "2"): 3}.get((local, nodes), 2)
    assert name_ranks(ranks, world, environ) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(5.4576, "5.458 s"), (0.1, "0.100 s"), (0.04321, "0.0432 s"), (0.000432, "0.000432 s")],
)
def test_seconds_show_three_digits_however_few_they_are(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text
