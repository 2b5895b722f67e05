"""Two vendors (simulated) on two hosts: names, families, rails and faults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed.harness import Numbers
from tests.hosts.network import Network
from tests.hosts.runs import GPT, MODEL, launch

ITERATIONS = ["--train-iters", "8"]


@pytest.fixture(scope="module")
def over_ipv6(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Numbers:
    """Undisturbed, on hosts without IPv4 addresses, started with torchrun."""
    pair = network.hosts[:2]
    with network.only_ipv6():
        run = launch(
            pair,
            [*MODEL, *ITERATIONS],
            tmp_path_factory.mktemp("run") / "ipv6",
            master=pair[0].ipv6_address(),
            launcher="torch.distributed.run",
        )
        run.wait_for(r"rank 0 .*: tcp \(ipc: .*different hosts")
        return run.numbers()


def test_a_run_survives_its_hosts_names_and_the_loss_of_rails_to_the_last_bit(
    network: Network, over_ipv6: Numbers, tmp_path: Path
) -> None:
    """Three rails with other names on each side, of which one is cut and one is taken down.

    Rank 0's host resolves its own name, which is MASTER_ADDR, to a loopback address; the other
    host's name resolves to nothing.
    """
    pair = network.hosts[:2]
    pair[0].name_resolves_to("127.0.1.1")
    pair[1].name_resolves_to(None, hosta=pair[0].address())
    run = launch(
        pair,
        [*MODEL, *ITERATIONS, "--hetero-transport", "tcp", "--hetero-tcp-connections", "3"],
        tmp_path / "ipv4",
        master="hosta",
        rails=3,
        held_after=3,
    )
    run.wait_for("iteration +3/")
    with network.cut(pair[0], rail=1), network.down(pair[1], rail=2):
        run.go_on()
        lost = [run.wait_for(rf"is lost: .*; {left} of 3 rails go on") for left in (2, 1)]
        named = [re.search(r"rail (\d) \(10.77.\1.[12] to 10.77.\1.[12]\)", line) for line in lost]
        assert {rail and rail[1] for rail in named} == {"1", "2"}
        ended = run.training()
    assert ended.numbers() == over_ipv6
    reported = [one for one in ended.report["incidents"] if one["kind"] == "rail lost"]
    assert {one["rank"] for one in reported} == {0, 1}
    for rank in (0, 1):
        mine = [one for one in reported if one["rank"] == rank]
        # Of each link between the two that carried something.
        assert {one["peer"] for one in mine} == {1 - rank}
        assert {re.sub(r"10\.77\.(\d)\..*", r"\1", one["rail"]) for one in mine} == {"1", "2"}
        told = " ".join(one["text"] for one in mine)
        assert "; 2 of 3 rails go on" in told
        assert "; 1 of 3 rails go on" in told


@pytest.mark.slow
def test_links_whose_connections_are_reset_and_whose_rail_comes_back_change_no_bit(
    network: Network, tmp_path: Path
) -> None:
    """Of a boundary with two rails beside the interface of everything else."""
    pair = network.hosts[:2]
    flags = [*MODEL, "--train-iters", "400", "--hetero-transport", "tcp"]
    flags += ["--hetero-tcp-connections", "2"]
    expected = launch(pair, flags, tmp_path / "whole", rails=(1, 2)).numbers()
    run = launch(pair, flags, tmp_path / "reset", rails=(1, 2), held_after=3)
    run.wait_for("iteration +3/")
    with network.resets(pair[0], rails=(1, 2)):
        run.go_on()
        run.wait_for(r"; 0 of 2 rails go on")
    for _ in pair:
        run.wait_for(r"is open again; 2 of 2 rails go on")
    with network.down(pair[1], rail=2):
        run.wait_for(r"rail 1 \(10.77.2.[12] to .* is lost: .*; 1 of 2 rails go on")
        sent = pair[0].bytes_sent(2)
    run.wait_for(r"rail 1 \(10.77.2.[12] to .* is open again; 2 of 2 rails go on")
    ended = run.training()
    assert ended.numbers() == expected
    assert pair[0].bytes_sent(2) > sent + (1 << 20)
    kinds = {one["kind"] for one in ended.report["incidents"]}
    assert {"rail lost", "rail back"} <= kinds
    assert not {"link failed", "rank lost"} & kinds


def test_replicas_on_two_hosts_compute_the_bits_of_one_host(
    network: Network, tmp_path: Path
) -> None:
    """Gradients cross over two rails, of which one is cut, and within one host over its memory."""
    pair = network.hosts[:2]
    flags = [
        *(*GPT, "--train-iters", "6", "--use-distributed-optimizer", "--overlap-grad-reduce"),
        *("--hetero-data-parallel", "amd:1,nvidia:1", "--hetero-data-shares", "3,1"),
    ]
    alone = launch(pair[:1], flags, tmp_path / "one", ranks=2)
    alone.wait_for("gradients cross vendors over (shm|ipc)")
    expected = alone.numbers()
    run = launch(
        pair,
        flags,
        tmp_path / "two",
        rails=2,
        held_after=3,
    )
    run.wait_for("gradients cross vendors over tcp")
    run.wait_for("iteration +3/")
    with network.cut(pair[0], rail=1):
        run.go_on()
        ends = r"\(10.77.1.[12] to 10.77.1.[12]\)"
        run.wait_for(rf"connection [12] of the 2 of rail 1 {ends} is lost: ")
        assert run.numbers() == expected


def test_slabs_between_meshes_of_two_shapes_share_the_rails_and_one_may_be_lost(
    network: Network, tmp_path: Path
) -> None:
    """Two tensor-parallel ranks on one host, two replicas on the other, two rails between them."""
    pair = network.hosts[:2]
    shapes = ["--hetero-tensor-sizes", "2", "1", "--hetero-data-sizes", "1", "2"]
    larger = ["--num-layers", "2", "--global-batch-size", "32", "--hidden-size", "128"]
    larger += ["--hetero-transport", "tcp", "--hetero-tcp-connections", "2"]
    numbers = []
    for name in ("whole", "lost"):
        before = [[host.bytes_sent(rail) for rail in (0, 1)] for host in pair]
        run = launch(
            pair,
            [*MODEL, *larger, *shapes, "--train-iters", "6"],
            tmp_path / name,
            rails=2,
            ranks=2,
            held_after=3 if name == "lost" else None,
        )
        run.wait_for("iteration +3/")
        if name == "lost":
            with network.cut(pair[0], rail=1):
                run.go_on()
                run.wait_for(r"rail 1 \(10.77.1.[12] to 10.77.1.[12]\) is lost: .*; 1 of 2 rails")
                numbers.append(run.numbers())
            continue
        numbers.append(run.numbers())
        for host, sent in zip(pair, before, strict=True):
            shares = [host.bytes_sent(rail) - sent[rail] for rail in (0, 1)]
            assert 0.35 < shares[1] / sum(shares) < 0.65
    assert numbers[0] == numbers[1]


def test_a_killed_rank_is_named_on_the_other_host(network: Network, tmp_path: Path) -> None:
    """By torchrun, which ends its own node's ranks at once and says nothing to the others."""
    run = launch(
        network.hosts[:2],
        [*MODEL, "--train-iters", "100000"],
        tmp_path / "killed",
        launcher="torch.distributed.run",
    )
    run.wait_for("iteration +3/")
    run.kill(0)
    survivor = run.end()[1]
    assert survivor.code == 1
    named = "rank 0 on hosta (stage 0) exited without reporting an error (last heard at "
    assert named in survivor.output


def test_a_host_that_disappears_is_named(network: Network, tmp_path: Path) -> None:
    """As without power: nothing of it is heard any more, not even that its processes have ended."""
    run = launch(
        network.hosts[:2],
        [*MODEL, "--train-iters", "100000", "--hetero-transport", "tcp", "--hetero-timeout", "8"],
        tmp_path / "gone",
        launcher="torch.distributed.run",
    )
    run.wait_for("iteration +3/")
    with network.cut(network.hosts[1], rail=0):
        run.kill(1)
        survivor = run.end()[0]
    assert survivor.code == 1
    assert re.search(r"rank 1 on hostb \(stage 1\) .*, and the network between", survivor.output)


def test_a_partition_is_told_from_a_rank_that_hangs(network: Network, tmp_path: Path) -> None:
    flags = ["--train-iters", "100000", "--hetero-stall-warning", "3"]
    run = launch(network.hosts[:2], [*MODEL, *flags], tmp_path / "partition")
    run.wait_for("iteration +20/")
    with network.cut(network.hosts[1], rail=0):
        told = run.wait_for("no progress for .* does not answer")
        run.kill_all()
    assert "rank 1 on hostb (stage 1, nvidia), which has sent no record for " in told
    assert "its host hostb does not answer hosta, the host of rank 0; it is down, or the " in told


@pytest.mark.slow
def test_a_rail_that_loses_packets_is_named_with_both_its_ends(
    network: Network, tmp_path: Path
) -> None:
    run = launch(
        network.hosts[:2],
        [
            *(*MODEL, "--train-iters", "100000", "--hidden-size", "256"),
            *("--hetero-transport", "tcp", "--hetero-tcp-connections", "2"),
        ],
        tmp_path / "losses",
        rails=2,
    )
    run.wait_for("iteration +20/")
    with network.losses(network.hosts[0], rail=1, percent=10):
        told = run.wait_for(r"warning: between rank .* loses packets: ")
        run.kill_all()
    assert re.search(r"rank 1 on hostb \(stage 1, nvidia\).*: rail 10\.77\.1\.\d to ", told)
