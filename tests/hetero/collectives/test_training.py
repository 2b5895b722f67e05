"""Plain PyTorch training over groups that cross vendors: DDP, FSDP2, DeviceMesh and DTensor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from examples.collectives.plain_torch import BATCH, STEPS, WIDTH, WRAPPERS, new_model, train
from tests.forked_ranks import values
from tests.hetero.collectives.ranks import THREE_AND_ONE, TWO_AND_TWO, Side, run_ranks

ROOT = Path(__file__).resolve().parents[3]


def losses_of_one_process() -> list[float]:
    model = new_model(torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        batch = torch.randn(BATCH, WIDTH, generator=generator)
        loss = torch.nn.functional.mse_loss(model(batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_in_every_way(side: Side) -> dict[str, list[float]]:
    losses = {how: train(how, torch.device("cpu")) for how in WRAPPERS}
    # Whole replicas over one dimension, shards over the other.
    mesh = init_device_mesh("cpu", (2, side.size // 2), mesh_dim_names=("replicas", "shards"))
    from torch.distributed.fsdp import fully_shard

    model = new_model(torch.device("cpu"))
    fully_shard(model, mesh=mesh)
    batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    mine = batch.chunk(side.size)[side.rank]
    loss = torch.nn.functional.mse_loss(model(mine), mine)
    loss.backward()
    dist.all_reduce(loss.detach(), op=dist.ReduceOp.AVG)
    losses["hsdp"] = [loss.item()]
    return losses


@pytest.mark.parametrize("vendors", [TWO_AND_TWO, THREE_AND_ONE], ids=["2+2", "3+1"])
def test_losses_are_those_of_one_process_with_the_whole_batch(vendors):
    expected = losses_of_one_process()
    ranks = values(run_ranks(train_in_every_way, vendors))
    assert all(losses == ranks[0] for losses in ranks), "the ranks hold different losses"
    for how in WRAPPERS:
        assert ranks[0][how] == pytest.approx(expected, rel=1e-5), how
    assert ranks[0]["hsdp"] == pytest.approx(expected[:1], rel=1e-5)


def train_compiled(side: Side) -> list[float]:
    """The second step calls the group from within compiled code: DDP makes its buckets anew."""
    model = torch.nn.parallel.DistributedDataParallel(new_model(torch.device("cpu")))
    compiled = torch.compile(model, backend="eager")
    batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    mine = batch.chunk(side.size)[side.rank]
    losses = []
    for _ in range(2):
        loss = torch.nn.functional.mse_loss(compiled(mine), mine)
        loss.backward()
        dist.all_reduce(loss := loss.detach(), op=dist.ReduceOp.AVG)
        losses.append(loss.item())
    return losses


def test_a_compiled_model_trains_with_ddp():
    import torch._dynamo  # noqa: F401  once for all ranks, which are forked

    for losses in values(run_ranks(train_compiled, ("amd", "nvidia"))):
        assert losses == pytest.approx([losses_of_one_process()[0]] * 2, rel=1e-5)


def train_on_uneven_inputs(side: Side) -> list[float]:
    """Each rank has a batch more than the one before it, and who has none left is left out."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    torch.nn.init.zeros_(model.module.weight)
    steps = []
    with model.join(divide_by_initial_world_size=False):
        for _ in range(1 + side.rank):
            model.zero_grad()
            (side.rank * model(torch.ones(1))).backward()
            steps.append(model.module.weight.grad.item())
    return steps


def test_gradients_of_uneven_inputs_are_averaged_over_the_ranks_that_have_some_left():
    by_rank = values(run_ranks(train_on_uneven_inputs, ("nvidia", "amd", "amd")))
    assert by_rank == [[1.0], [1.0, 1.5], [1.0, 1.5, 2.0]]


HETERO_RUN = ("hetero.run",)
TORCHRUN = ("torch.distributed.run", "-m", "hetero.run")


@pytest.mark.parametrize(
    ("launcher", "how", "vendors", "ranks"),
    [(HETERO_RUN, "ddp", "nvidia,amd", 2), (TORCHRUN, "fsdp2", "nvidia*2,amd", 3)],
    ids=["hetero.run", "torchrun"],
)
def test_a_script_that_says_nccl_runs_unchanged(launcher, how, vendors, ranks, request):
    if launcher is TORCHRUN:  # The other imports torch in each process, which looks for us then.
        request.getfixturevalue("preloaded_ranks")
    environ = os.environ | {"HETERO_VENDOR": vendors, "GLOO_SOCKET_IFNAME": "lo"}
    place = ["--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            launcher[0],
            *place,
            *launcher[1:],
            "examples/collectives/plain_torch.py",
            "--with",
            how,
        ],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    group = f"<group of {ranks} ranks of 2 vendors>"
    assert done.stdout.startswith(f"{how} over {group}:"), done.stdout
