"""All ranks of a script together: what rank 0 knows of each, and how long."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hetero.collectives import process_group
from hetero.collectives import world as world_module
from hetero.collectives.world import World, adopt, own_world
from hetero.errors import LinkError
from hetero.observe.collect import Seen
from hetero.observe.record import Phase
from hetero.pipeline.groups import create_group
from hetero.startup.liveness import Liveness, LivenessClient, LivenessServer, ServerAddress
from tests.distributed.harness import free_port
from tests.forked_ranks import values
from tests.hetero.collectives.ranks import Side, open_group, run_ranks
from tests.hetero.collectives.test_process_group import _cpu_as_accelerator
from tests.live_views import state_of

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 60.0


def world() -> World:
    own = own_world()
    assert own is not None
    return own


def awaited(look: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not look():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)


def seen_on_rank_0(rank: int) -> Seen | None:
    collector = world().collector
    assert collector is not None
    return collector.seen().get(rank)


def incidents() -> list[tuple[str, str]]:
    collector = world().collector
    assert collector is not None
    return [(incident["kind"], incident["text"]) for incident in collector.incidents()]


def test_rank_0_sees_calls_links_and_waits_of_every_rank() -> None:
    (outcome, *_) = run_ranks(wait_for_one_that_is_late, ("nvidia", "amd", "nvidia"))
    assert outcome.value is not None, outcome.error
    ranks = outcome.value
    for rank in (1, 2):
        assert ranks[rank]["phase"] == Phase.SCRIPT
        assert ranks[rank]["rank"] == rank
    # Rank 0 has nothing to send before rank 2, of its vendor, has come.
    (wait,) = ranks[1]["waits"]
    assert wait["peers"] == [0]
    assert re.fullmatch(r"message \d from rank 0", wait["what"])
    calls = [(call["operation"], call["sequence"], call["state"]) for call in ranks[1]["calls"]]
    assert calls == [("all_reduce", 2, "started")]
    assert {link["peer"] for link in ranks[1]["links"]} == {0, 2}
    assert sum(link["bytes_sent"] for link in ranks[1]["links"]) >= 12_000
    assert ranks[2]["waits"] == []
    assert [call["state"] for call in ranks[2]["calls"]] == ["completed"]


def wait_for_one_that_is_late(side: Side) -> list[dict[str, Any]]:
    dist.all_reduce(torch.ones(3000))
    if side.rank == 2:
        side.hear("seen")
    work = dist.all_reduce(torch.ones(3000), async_op=True) if side.rank == 0 else None
    records: list[dict[str, Any]] = []
    if side.rank == 0:

        def is_known() -> bool:
            late, waiting = seen_on_rank_0(2), seen_on_rank_0(1)
            return bool(
                late is not None
                and [call.state for call in late.snapshot.calls] == ["completed"]
                and waiting is not None
                and [call.sequence for call in waiting.snapshot.calls] == [2]
                and waiting.snapshot.waits
            )

        awaited(is_known)
        collector = world().collector
        assert collector is not None
        records = [json.loads(seen.snapshot.to_json()) for seen in collector.seen().values()]
        side.say("seen")
    assert work is None or work.wait()
    if side.rank > 0:
        dist.all_reduce(torch.ones(3000))
    return records


def test_who_holds_a_script_up_is_told_once_a_call_has_waited_for_long() -> None:
    (outcome, *_) = run_ranks(stay_outside, ("nvidia", "amd", "nvidia"), backend=None)
    host = re.escape(socket.gethostname())
    assert outcome.value, outcome.error
    text = outcome.value[0]
    assert re.match(rf"rank [01] on {host} \(\w+\) waits \d+ s .*, which", text)
    assert re.search(rf"rank 2 on {host} \(nvidia\), which is in no call of a group", text)


def stay_outside(side: Side) -> list[str]:
    """What rank 0 tells of a rank that does not come to the second call."""
    os.environ["HETERO_STALL_WARNING"] = "1"
    open_group(side)
    dist.all_reduce(torch.ones(3000))
    if side.rank == 2:
        side.hear("told")
    work = dist.all_reduce(torch.ones(3000), async_op=True)
    told: list[str] = []
    if side.rank == 0:

        def is_told() -> bool:
            # On a busy machine a call may have waited for long for another rank too.
            stalls = [text for kind, text in incidents() if kind == "stall"]
            told[:] = [text for text in stalls if re.search("rank 2 .* is in no call", text)]
            return bool(told)

        awaited(is_told)
        side.say("told")
    assert work is not None
    assert work.wait()
    return told


def test_what_is_known_of_each_rank_is_its_host_and_vendor() -> None:
    (outcome, *_) = run_ranks(describe, ("nvidia", "amd"))
    host = socket.gethostname()
    assert outcome.value == [(0, host, "nvidia", True), (1, host, "amd", True)]


def describe(side: Side) -> list[tuple[int, str, str, bool]]:
    return [(r.rank, r.host, r.vendor, r.is_simulated) for r in world().description.ranks]


def test_a_default_group_that_is_made_again_begins_anew_and_leaves_nothing_behind() -> None:
    for found in values(run_ranks(open_and_destroy, ("nvidia", "amd"), backend=None)):
        assert found == ["seen", "left"] * 3 + ["one thread at most"]


def open_and_destroy(side: Side) -> list[str]:
    found = []
    for cycle in range(3):
        open_group(side)
        dist.all_reduce(torch.ones(3))
        if side.rank == 0:
            awaited(lambda: seen_on_rank_0(1) is not None)
            assert incidents() == []
            side.say(f"seen in {cycle}")
        side.hear(f"seen in {cycle}")
        found.append("seen")
        dist.destroy_process_group()
        found.append("left" if own_world() is None else "there")
        side.say(f"left {cycle}/{side.rank}")
        side.hear(f"left {cycle}/{1 - side.rank}")
    awaited(lambda: liveness_threads() <= 1)
    return [*found, "one thread at most"]


def test_subgroups_and_parts_of_a_group_neither_begin_another_nor_end_it() -> None:
    assert values(run_ranks(make_subgroups, ("nvidia", "amd", "amd"))) == [[True] * 4] * 3


def make_subgroups(side: Side) -> list[bool]:
    first, found = world(), []
    of_all = dist.new_group(backend="hetero")
    found.append(own_world() is first)
    dist.destroy_process_group(of_all)
    found.append(own_world() is first)
    some = dist.new_group([0, 1], backend="hetero")
    found.append(own_world() is first)
    if side.rank < 2:
        dist.destroy_process_group(some)
    with _cpu_as_accelerator():
        dist.split_group(split_ranks=[[0, 2], [1]])
    found.append(own_world() is first)
    return found


def test_where_the_default_group_is_another_backend_s_a_group_of_all_ranks_begins_it() -> None:
    outcomes = run_ranks(begin_with_gloo, ("nvidia", "amd", "amd"), backend="gloo")
    assert values(outcomes) == [(False, False, True, False)] * 3


def begin_with_gloo(side: Side) -> tuple[bool, ...]:
    found = [own_world() is not None]
    some = dist.new_group([0, 1], backend="hetero")
    if side.rank < 2:
        dist.all_reduce(torch.ones(3), group=some)
    found.append(own_world() is not None)
    of_all = dist.new_group(backend="hetero")
    dist.all_reduce(torch.ones(3), group=of_all)
    found.append(own_world() is not None)
    if side.rank == 0:
        awaited(lambda: seen_on_rank_0(2) is not None)
        side.say("seen")
    side.hear("seen")
    dist.destroy_process_group(of_all)
    return (*found, own_world() is not None)


def test_a_group_of_some_ranks_knows_who_has_exited_where_none_of_all_is_there() -> None:
    outcomes = run_ranks(
        wait_in_a_group_of_some, ("nvidia", "amd", "amd", "nvidia"), backend="gloo"
    )
    for rank in (1, 3):
        text, threads = outcomes[rank].value
        assert re.search("rank 2 on [^ ]+ has exited or left the group", text), text
        assert threads == [1, 1, 0], "it is shared, and ends with the last group"


def wait_in_a_group_of_some(side: Side) -> tuple[str, list[int]]:
    if side.rank == 0:
        return "", []
    some = create_group_of(side, [1, 2, 3], "some")
    threads = [liveness_threads()]
    pair = create_group_of(side, [1, 3], "pair") if side.rank != 2 else None
    if side.rank == 2:
        side.hear("paired")
        side.say("end/2")
        os._exit(0)
    threads.append(liveness_threads())
    side.say("paired")
    with pytest.raises(LinkError) as raised:
        dist.recv(torch.ones(3), src=2, group=some)
    for group in filter(None, (pair, some)):
        dist.destroy_process_group(group)
    awaited(lambda: liveness_threads() == 0)
    return str(raised.value), [*threads, liveness_threads()]


def create_group_of(side: Side, ranks: list[int], name: str) -> dist.ProcessGroup:
    """Without the ranks that are not in it, which `dist.new_group` would wait for."""
    return dist.new_group(ranks, backend="hetero", use_local_synchronization=True, group_desc=name)


def liveness_threads() -> int:
    return sum(thread.name == "liveness" for thread in threading.enumerate())


def test_a_group_of_some_ranks_lives_on_after_that_of_all_whose_world_it_shares() -> None:
    found = values(run_ranks(outlive_a_group_of_all, ("nvidia", "amd"), backend="gloo"))
    assert found == [(True, True, False)] * 2


def outlive_a_group_of_all(side: Side) -> tuple[bool, bool, bool]:
    of_all = dist.new_group(backend="hetero")
    pair = dist.new_group([0, 1], backend="hetero")
    first = own_world()
    dist.destroy_process_group(of_all)
    goes_on = own_world() is first
    dist.all_reduce(torch.ones(3), group=pair)
    dist.destroy_process_group(pair)
    return first is not None, goes_on, own_world() is not None


def test_where_members_share_no_world_any_more_the_group_is_made_without() -> None:
    """As where one of them has destroyed a group that the others keep."""
    for total in values(run_ranks(disagree, ("nvidia", "amd"), backend="gloo")):
        assert total == 2.0


def disagree(side: Side) -> float:
    of_all = dist.new_group(backend="hetero")
    if side.rank == 1:
        dist.destroy_process_group(of_all)
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group(backend="hetero"))
    return total.item()


@pytest.mark.parametrize(
    ("rank", "vendors"), [(0, ("nvidia", "amd", "amd")), (2, ("nvidia", "nvidia", "amd"))]
)
def test_a_rank_that_exits_while_a_group_is_built_is_named_to_the_others(
    rank: int, vendors: tuple[str, ...]
) -> None:
    """After the others have learned that it is there, and before it has connected."""
    outcomes = run_ranks(exit_while_built, vendors, backend=None, who=rank)
    for other in {0, 1, 2} - {rank}:
        text = outcomes[other].value
        assert re.search(f"rank {rank} on [^ ]+ has exited|cannot reach rank {rank} on", text), text


def exit_while_built(side: Side) -> str:
    found = process_group.exchange_identities

    def then_exit(*given: Any, **named: Any) -> None:
        found(*given, **named)
        side.say(f"end/{side.rank}")
        os._exit(0)

    with mock.patch.object(world_module, "_CONNECTED_SECONDS", 1.0):
        if side.rank == side.options["who"]:
            process_group.exchange_identities = then_exit  # type: ignore[assignment]
        with pytest.raises(Exception, match="group 0 could not be built") as raised:
            open_group(side)
    return str(raised.value)


def test_a_rank_that_cannot_connect_to_the_one_that_serves_builds_no_group() -> None:
    for text in values(run_ranks(fail_to_connect, ("nvidia", "amd"), backend=None)):
        assert re.search("rank 1 on .*: [^ ]+ cannot reach rank 0 on .* open the ports", text), text


def fail_to_connect(side: Side) -> str:
    """As where a firewall rejects it."""
    refused = ConnectionRefusedError("refused")
    with (
        mock.patch.object(LivenessClient, "_connect", side_effect=refused),
        pytest.raises(Exception, match="group 0 could not be built") as raised,
    ):
        open_group(side)
    return str(raised.value)


def test_groups_with_planned_vendors_share_the_liveness_that_training_has() -> None:
    outcomes = run_ranks(plan_with_liveness, ("nvidia", "amd"), backend="gloo")
    text, has_begun, threads = outcomes[0].value
    assert re.search("rank 1 on [^ ]+ has exited or left the group", text), text
    assert not has_begun
    assert threads == 1


def plan_with_liveness(side: Side) -> tuple[str, bool, int]:
    live: Liveness
    if side.rank == 0:
        live = LivenessServer(world_size=2, token="a job's")
        side.store.set("address", json.dumps(live.address_for("127.0.0.1")))
    else:
        told = ServerAddress.read(json.loads(side.store.get("address")), master="127.0.0.1")
        live = LivenessClient(lambda: told, rank=1, world_size=2)
        live.await_connection()
    adopt(live, rank=side.rank, world_size=2)
    group, then = (
        create_group(
            name,
            [0, 1],
            backend="hetero",
            timeout=dist.default_pg_timeout,
            vendor=os.environ["HETERO_VENDOR"],
        )
        for name in ("first", "second")
    )
    dist.destroy_process_group(group)  # which ends no liveness of training's
    if side.rank == 1:
        side.say("end/1")
        os._exit(0)
    with pytest.raises(LinkError) as raised:
        dist.recv(torch.ones(3), src=1, group=then)
    return str(raised.value), own_world() is not None, liveness_threads()


def test_groups_with_planned_vendors_begin_none() -> None:
    for has_begun, threads in values(run_ranks(plan_groups, ("nvidia", "amd"), backend="gloo")):
        assert not has_begun
        assert threads == 0


def plan_groups(side: Side) -> tuple[bool, int]:
    group = create_group(
        "crossing",
        [0, 1],
        backend="hetero",
        timeout=dist.default_pg_timeout,
        vendor=os.environ["HETERO_VENDOR"],
    )
    dist.all_reduce(torch.ones(3), group=group)
    return own_world() is not None, liveness_threads()


@pytest.mark.parametrize("vendors", [("nvidia", "nvidia"), ("amd",)])
def test_ranks_of_one_vendor_and_a_single_rank_have_it_too(vendors: tuple[str, ...]) -> None:
    assert values(run_ranks(be_of_one_vendor, vendors)) == [True] * len(vendors)


def be_of_one_vendor(side: Side) -> bool:
    if side.rank == 0:
        awaited(lambda: all(seen_on_rank_0(rank) for rank in range(side.size)))
        side.say("seen")
    side.hear("seen")
    dist.destroy_process_group()
    return own_world() is None


def test_who_is_killed_is_an_incident_and_who_leaves_is_none() -> None:
    (outcome, *_) = run_ranks(lose_a_rank, ("nvidia", "amd", "amd"))
    ((kind, text),) = outcome.value
    assert kind == "rank lost"
    assert "rank 2 on " in text
    assert "exited without reporting an error" in text


def lose_a_rank(side: Side) -> list[tuple[str, str]]:
    if side.rank == 0:
        awaited(lambda: all(seen_on_rank_0(rank) for rank in range(side.size)))
        side.say("seen")
    side.hear("seen")
    if side.rank == 1:
        dist.destroy_process_group()
        side.say("left")
    if side.rank == 2:
        side.hear("left")
        side.say("end/2")
        os.kill(os.getpid(), signal.SIGKILL)
    if side.rank == 0:
        awaited(lambda: bool(incidents()))
        return incidents()
    return []


ENDS = """
import sys, time
import torch.distributed as dist
import hetero
hetero.register()
rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 3)
dist.init_process_group("hetero", store=store, rank=rank, world_size=3)
if rank == 2:
    store.wait(["seen"])
    raise ValueError("out of luck")
if rank == 1:
    store.wait(["seen"])
    sys.exit(0)
from hetero.collectives.world import own_world
collector = own_world().collector
deadline = time.monotonic() + 60
while len(collector.seen()) < 3 and time.monotonic() < deadline:
    time.sleep(0.05)
store.set("seen", "")
while not collector.incidents() and time.monotonic() < deadline:
    time.sleep(0.05)
time.sleep(2)
print([incident["text"] for incident in collector.incidents()])
"""


def test_a_script_that_ends_without_a_word_has_left_and_one_that_raises_tells_why(
    tmp_path: Path,
) -> None:
    """Of fresh processes: it is the interpreter's own end."""
    (tmp_path / "script.py").write_text(ENDS)
    own = {"PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "script.py"), str(rank), str(tmp_path / "store")],
            env=os.environ | own | {"HETERO_VENDOR": vendor, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, vendor in enumerate(("nvidia", "amd", "amd"))
    ]
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 1], outputs
    host = socket.gethostname()
    assert outputs[0][0] == f"['rank 2 on {host} failed: ValueError: out of luck']\n"
    assert outputs[1] == ("", "")


def test_a_forked_child_has_none_and_its_end_leaves_its_parent_s() -> None:
    (outcome, *_) = run_ranks(fork_a_child, ("nvidia", "amd"))
    assert outcome.value == ("nothing", 0, [])


def fork_a_child(side: Side) -> tuple[str, int, list[tuple[str, str]]]:
    own = world()
    child = os.fork()
    if not child:
        own.close()  # as its exit does
        os._exit(0 if own_world() is None else 1)
    _, status = os.waitpid(child, 0)
    if side.rank == 0:
        began = time.monotonic()

        def is_heard_again() -> bool:
            seen = seen_on_rank_0(1)
            return seen is not None and seen.age < time.monotonic() - began

        awaited(is_heard_again)
        side.say("heard")
    side.hear("heard")
    return "nothing", status, incidents() if side.rank == 0 else []


def test_rank_0_may_leave_first_and_the_others_go_on() -> None:
    outcomes = run_ranks(leave_rank_0_first, ("nvidia", "amd", "nvidia"))
    assert values(outcomes)[1:] == [4.0, 4.0]


def leave_rank_0_first(side: Side) -> float:
    tensor = torch.full((3,), float(side.rank + 1))
    some = dist.new_group([1, 2], backend="hetero")
    if side.rank == 0:
        awaited(lambda: all(seen_on_rank_0(rank) for rank in range(side.size)))
        dist.destroy_process_group()
        side.say("left")
        return 0.0
    side.hear("left")
    time.sleep(1.5)
    # The mean of both.
    dist.all_reduce(tensor, group=some)
    dist.destroy_process_group()
    return tensor[0].item() - 1.0


def test_rank_0_serves_the_live_view_until_the_group_ends() -> None:
    port = free_port()
    outcomes = run_ranks(serve, ("nvidia", "amd"), backend=None, port=str(port))
    state, later = outcomes[0].value
    assert state["is_simulated"]
    assert [(rank["rank"], rank["vendor"], rank["phase"]) for rank in state["ranks"]] == [
        (0, "nvidia", "script"),
        (1, "amd", "script"),
    ]
    assert state["ranks"][1]["calls"][0]["operation"] == "all_reduce"
    assert later == "ConnectionRefusedError"


def serve(side: Side) -> tuple[dict[str, Any], str]:
    os.environ["HETERO_METRICS_PORT"] = port = side.options["port"]
    open_group(side)
    dist.all_reduce(torch.ones(3))
    state: dict[str, Any] = {}
    if side.rank == 0:

        def is_complete() -> bool:
            state.update(state_of(int(port)))
            return state["ranks_seen"] == 2 and bool(state["ranks"][1]["calls"])

        awaited(is_complete)
        side.say("seen")
    side.hear("seen")
    dist.destroy_process_group()
    try:
        state_of(int(port))
    except OSError as error:
        return state, type(error).__name__
    return state, "it answers"


@pytest.mark.parametrize("given", ["http", "taken"])
def test_a_live_view_that_cannot_be_had_is_told_once_and_the_script_goes_on(given: str) -> None:
    outcomes = run_ranks(go_on_without_view, ("nvidia", "amd"), backend=None, given=given)
    total, told = outcomes[0].value
    assert total == 2.0
    (line,) = told
    assert "hetero: warning: no live view: " in line
    assert ("cannot listen on 127.0.0.1" if given == "taken" else "give a port, 1 to 65535") in line
    assert outcomes[1].value == (2.0, [])


def go_on_without_view(side: Side) -> tuple[float, list[str]]:
    told: list[str] = []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        given = side.options["given"]
        number = str(taken.getsockname()[1]) if given == "taken" else given
        os.environ["HETERO_METRICS_PORT"] = number
        with mock.patch.object(world_module, "print_line", told.append):
            open_group(side)
            tensor = torch.ones(3)
            dist.all_reduce(tensor)
    return tensor[0].item(), told


def test_where_rank_0_cannot_listen_the_group_is_made_all_the_same() -> None:
    by_rank = values(run_ranks(go_on_without_liveness, ("nvidia", "amd"), backend=None))
    assert by_rank[0] == (2.0, True, ["hetero: warning: no records of other ranks on rank 0: full"])
    assert by_rank[1] == (2.0, False, [])


def go_on_without_liveness(side: Side) -> tuple[float, bool, list[str]]:
    told: list[str] = []
    with (
        mock.patch.object(LivenessServer, "__init__", side_effect=OSError("full")),
        mock.patch.object(world_module, "print_line", told.append),
    ):
        open_group(side)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    return tensor[0].item(), own_world() is not None, told


def test_a_group_that_could_not_be_built_leaves_none_behind() -> None:
    for error, has_world in values(run_ranks(fail_to_build, ("nvidia", "amd"), backend=None)):
        assert "could not be built" in error
        assert not has_world


def fail_to_build(side: Side) -> tuple[str, bool]:
    if side.rank == 1:
        os.environ["HETERO_VENDOR"] = "amd,nvidia"
        os.environ["LOCAL_RANK"] = "7"
    with pytest.raises(Exception, match="group 0") as raised:
        open_group(side)
    return str(raised.value), own_world() is not None
