"""What a rank that fails tells the others, who then end with it, and the seeds of ranks."""

from __future__ import annotations

import socket
from argparse import Namespace
from collections.abc import Iterator

import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from hetero.link.base import LinkError
from hetero.plan import Mesh, Plan
from hetero.startup.liveness import LivenessClient, LivenessServer, LocalRanks, ServerAddress
from megatron.hetero.cpu_shim import cpu_shim
from megatron.hetero.initialize import Initializer, seed_everything
from megatron.hetero.pretrain import _report_exception

PATIENCE = 60.0
"""Seconds that a test waits for what comes within milliseconds on a machine that is not busy."""
HANGS = (
    "rank 2 on c (stage 1) was last heard 10 s ago; see whether it, or its host, hangs, "
    "and the network between"
)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LivenessServer]:
    """Rank 0's side, where rank 2 hangs."""
    made = LivenessServer(world_size=3, token="a job's")
    made.set_names({0: "rank 0 on a (stage 0)", 2: "rank 2 on c (stage 1)"})
    monkeypatch.setattr(made, "_query_silent", lambda: {2: 10.0})
    yield made
    made.leave()


@pytest.fixture
def other(server: LivenessServer) -> Iterator[LivenessClient]:
    """A rank that waits for neither of them."""
    made = LivenessClient(
        lambda: ServerAddress("127.0.0.1", server.port, "a job's"), rank=1, world_size=3
    )
    made.set_names({0: "rank 0 on a (stage 0)"})
    made.await_connection()
    yield made
    made.leave()


@pytest.fixture
def initializer(server: LivenessServer) -> Initializer:
    made = Initializer(LocalRanks())
    made.world_size, made.liveness = 3, server
    return made


def test_who_gives_up_a_rank_that_hangs_tells_the_others_which_it_was(
    initializer: Initializer, other: LivenessClient
) -> None:
    initializer.report(LinkError("receiving failed"))
    assert other.cause(PATIENCE) == f"rank 0 on a (stage 0) failed: receiving failed; {HANGS}"


def test_a_collective_that_waited_for_a_rank_that_hangs_is_told_with_it(
    initializer: Initializer, other: LivenessClient
) -> None:
    _report_exception(initializer, RuntimeError("[gloo/transport/tcp.cc:1] Timed out waiting"))
    said = f"a collective failed (it took too long); {HANGS}"
    assert other.cause(PATIENCE) == f"rank 0 on a (stage 0) failed: {said}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "(pid 12) is killed by signal: Bus error. It is possible",
            "is killed by signal: Bus error;",
        ),
        ("(pid(s) 12, 13) exited unexpectedly", "exited unexpectedly;"),
    ],
)
def test_a_worker_of_the_data_loader_that_dies_is_one_sentence(
    text: str, said: str, initializer: Initializer, capsys: pytest.CaptureFixture[str]
) -> None:
    _report_exception(initializer, RuntimeError(f"DataLoader worker {text}"))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: rank 0: a worker that reads the data {said} see whether")


IN_WORKER = """Caught RuntimeError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "collate.py", line 273, in collate_tensor_fn
RuntimeError: {}
"""
"""What PyTorch raises for an exception of a worker."""


def test_shared_memory_that_is_full_is_one_sentence_with_its_name(
    initializer: Initializer, other: LivenessClient, capsys: pytest.CaptureFixture[str]
) -> None:
    raised = (
        "unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device"
    )
    _report_exception(initializer, RuntimeError(IN_WORKER.format(f"{raised} (28)")))
    (line,) = capsys.readouterr().err.splitlines()
    said = (
        "no shared memory can be had for the data (No space left on device); make /dev/shm larger"
    )
    assert line.startswith(f"error: rank 0: {said}")
    assert str(other.cause(PATIENCE)).startswith(f"rank 0 on a (stage 0) failed: {said}")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            RuntimeError(IN_WORKER.format("out of luck")),
            "RuntimeError: out of luck (in DataLoader worker process 0)",
        ),
        (ValueError("one\ntwo"), "ValueError: one"),
        (KeyError(), "KeyError"),
    ],
)
def test_other_ranks_are_told_of_an_unexpected_exception_in_a_line(
    initializer: Initializer, other: LivenessClient, error: Exception, told: str
) -> None:
    _report_exception(initializer, error)
    assert other.cause(PATIENCE) == f"rank 0 on a (stage 0) failed: {told}"


@pytest.mark.parametrize(
    "error",
    [BrokenPipeError(32, "Broken pipe"), ConnectionResetError(104, "Connection reset by peer")],
)
def test_a_lost_connection_of_a_script_s_own_is_no_failed_collective(
    initializer: Initializer, other: LivenessClient, error: OSError
) -> None:
    """As that to a service to which metrics are sent."""
    _report_exception(initializer, error)
    said = f"{type(error).__name__}: {error}"
    assert other.cause(PATIENCE) == f"rank 0 on a (stage 0) failed: {said}"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 16 bytes"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
    ],
    ids=["CPU", "GPU", "Python"],
)
def test_a_rank_that_runs_out_of_memory_is_named_after_its_traceback(
    initializer: Initializer, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    initializer.name = "rank 0 on a (stage 0, amd)"
    _report_exception(initializer, error)
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: rank 0 on a (stage 0, amd) ran out of memory (")
    assert line.endswith("make --micro-batch-size smaller, or give its stage fewer layers")


def test_who_ends_because_another_has_ended_says_nothing_of_itself(
    initializer: Initializer, server: LivenessServer, other: LivenessClient
) -> None:
    other.fail("out of memory")
    assert server.cause(PATIENCE) is not None
    initializer.report(LinkError("receiving failed"))
    initializer.announce_failure("receiving failed")
    assert other.cause(PATIENCE) == f"rank 1 on {socket.gethostname()} failed: out of memory"


def test_every_rank_of_a_sequence_draws_its_own_dropout() -> None:
    """And tensor-parallel ranks, and stages; replicas draw the same, as in Megatron."""
    plan = Plan((Mesh("cpu", 2, tensor=2, context=2, data=2),), layers=((1,), (1,)))
    args = Namespace(seed=7)
    drawn: dict[tuple[float, ...], set[int]] = {}
    with cpu_shim():
        for rank in range(plan.world_size):
            place = plan.coordinate(rank)
            seed_everything(args, place)
            outside = torch.rand(4).tolist()
            with get_cuda_rng_tracker().fork():
                inside = torch.rand(4).tolist()
            assert outside != inside
            drawn.setdefault(tuple(inside), set()).add(rank)
    groups = {tuple(sorted(ranks)) for ranks in drawn.values()}
    # Ranks 0 to 3 and 4 to 7 are the two replicas of the first stage.
    assert groups == {(r, r + 4) for r in (0, 1, 2, 3, 8, 9, 10, 11)}
