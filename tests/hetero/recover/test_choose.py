"""What a restart resumes from: the newest iteration of which nothing is missing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetero.recover.choose import Fetch, Level, choose
from hetero.recover.node_state import Generation, Inventory
from hetero.recover.stored_files import INDEX_FILE
from tests.hetero.recover.played_state import rank_file

A, B = rank_file(0), rank_file(1)
RANKS = {0: [0], 1: [1]}


def has(iteration: int, *files: str, digest: str = "") -> Generation:
    named = frozenset({A, B})
    return Generation(iteration, digest or f"d{iteration}", named, frozenset(files))


def test_the_newest_iteration_that_is_whole_among_the_nodes_is_taken() -> None:
    nodes = {0: Inventory((has(20, A), has(10, A))), 1: Inventory((has(20, B), has(10, B)))}
    choice = choose(nodes, 5, ranks=RANKS)
    assert (choice.level, choice.iteration, choice.digest) == (Level.MEMORY, 20, "d20")
    assert choice.fetches == {}, "what other nodes' ranks have written stays there"
    assert choice.holders == {A: 0, B: 1}
    assert "iteration 20 in memory, whole on 2 nodes (0, 1); the newest on disk is 5" in (
        choice.reason
    )


def test_a_lost_nodes_files_come_from_its_partner() -> None:
    """Node 1 is a spare with nothing; node 0 has a copy of what the lost one had."""
    nodes = {0: Inventory((has(20, A),), {1: (has(20, B),)}), 1: Inventory()}
    choice = choose(nodes, None, ranks=RANKS)
    assert (choice.level, choice.iteration) == (Level.MEMORY, 20)
    assert choice.fetches == {
        0: (Fetch(B, 0, "of_1/iter_0000020"),),
        1: (Fetch(INDEX_FILE, 0, "iter_0000020"), Fetch(B, 0, "of_1/iter_0000020")),
    }
    assert choice.holders[A] == 0


def test_a_node_that_has_moved_fetches_what_its_new_ranks_have_written() -> None:
    nodes = {0: Inventory((has(20, B),)), 1: Inventory((has(20, A),))}
    choice = choose(nodes, None, ranks=RANKS)
    assert choice.fetches == {
        0: (Fetch(A, 1, "iter_0000020"),),
        1: (Fetch(B, 0, "iter_0000020"),),
    }


def test_a_fallback_plan_reads_the_lost_ranks_files_where_copies_are() -> None:
    nodes = {0: Inventory((has(20, A),)), 1: Inventory((), {1: (has(20, B),)})}
    choice = choose(nodes, None, ranks={0: [0], 1: []})
    assert choice.fetches == {
        1: (Fetch(INDEX_FILE, 1, "of_1/iter_0000020"), Fetch(B, 1, "of_1/iter_0000020")),
    }
    assert choice.holders == {A: 0, B: 1}


def test_what_the_partner_has_not_copied_yet_is_passed_over_for_an_older_one() -> None:
    nodes = {0: Inventory((has(20, A), has(10, A)), {1: (has(10, B),)})}
    choice = choose(nodes, None, ranks=RANKS)
    assert choice.iteration == 10
    assert f"of iteration 20 no node has {B}" in choice.reason


def test_the_disk_is_taken_where_it_is_newer_or_memory_has_nothing_whole() -> None:
    whole = {0: Inventory((has(20, A, B),))}
    assert choose(whole, 30, ranks=RANKS).level is Level.DISK
    assert choose(whole, 20, ranks=RANKS).level is Level.MEMORY, "as new, and read faster"
    lacking = choose({0: Inventory((has(40, A),))}, 30, ranks=RANKS)
    assert (lacking.level, lacking.iteration) == (Level.DISK, 30)
    assert f"of iteration 40 no node has {B}" in lacking.reason


def test_nothing_anywhere_is_said_so() -> None:
    choice = choose({0: Inventory(), 1: Inventory()}, None, ranks=RANKS)
    assert (choice.level, choice.iteration, dict(choice.fetches)) == (Level.NOTHING, None, {})


def test_parts_of_two_attempts_are_not_put_together() -> None:
    nodes = {
        0: Inventory((has(20, A, digest="first"), has(10, A))),
        1: Inventory((has(20, B, digest="second"), has(10, B))),
    }
    assert choose(nodes, None, ranks=RANKS).iteration == 10


GENERATIONS = st.lists(
    st.tuples(st.integers(1, 4), st.sets(st.sampled_from([A, B]))), max_size=2
).map(lambda found: tuple(has(i, *files) for i, files in dict(found).items()))


@given(
    st.dictionaries(
        st.integers(0, 3),
        st.builds(Inventory, GENERATIONS, st.dictionaries(st.integers(0, 3), GENERATIONS)),
        max_size=4,
    ),
    st.none() | st.integers(0, 5),
)
def test_every_file_is_with_its_holder_once_all_have_fetched(
    nodes: dict[int, Inventory], disk: int | None
) -> None:
    choice = choose(nodes, disk, ranks=RANKS)
    if choice.level is not Level.MEMORY:
        assert choice.iteration == disk
        return
    assert disk is None or choice.iteration >= disk

    def gets(node: int) -> set[str]:
        own = nodes[node].own
        here = {f for one in own if one.digest == choice.digest for f in one.present}
        return here | {one.file for one in choice.fetches.get(node, ())}

    assert set(choice.holders) == {A, B}
    assert all(file in gets(node) for file, node in choice.holders.items())
    for node in nodes:
        assert gets(node) >= {rank_file(rank) for rank in RANKS.get(node, [])}
        for one in choice.fetches.get(node, ()):
            there = nodes[one.node]
            held = [*there.own, *(g for copies in there.copies.values() for g in copies)]
            assert any(one.file in {*g.present, INDEX_FILE} for g in held)
