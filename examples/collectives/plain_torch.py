"""A training script as anyone has it: it says backend="nccl" and knows nothing of vendors.

    python -m hetero.run --standalone --nproc-per-node 4 examples/collectives/plain_torch.py

With HETERO_VENDOR='nvidia*2,amd*2' one machine plays two vendors (simulated). The model learns to
copy its input; every rank takes its part of each batch, so the loss is that of one process with the
whole batch, to rounding.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

WIDTH, BATCH, STEPS = 64, 32, 5


class Block(nn.Module):
    """Two layers with what they were given added."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def new_model(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH)).to(device)


def with_ddp(model: nn.Sequential, device: torch.device) -> nn.Module:
    return DistributedDataParallel(model)


def with_fsdp2(model: nn.Sequential, device: torch.device) -> nn.Module:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in model:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def with_tensor_parallel(model: nn.Sequential, device: torch.device) -> nn.Module:
    """The layers of each block cut over all ranks, every rank with the whole batch."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    for block in (model[0], model[1]):
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    # A tensor of its own, there and back.
    whole = torch.arange(float(WIDTH), device=device)
    cut = distribute_tensor(whole, mesh, [Shard(0)])
    assert isinstance(cut, DTensor)
    assert torch.equal(cut.full_tensor(), whole)
    return model


WRAPPERS: dict[str, Callable[[nn.Sequential, torch.device], nn.Module]] = {
    "ddp": with_ddp,
    "fsdp2": with_fsdp2,
    "tensor-parallel": with_tensor_parallel,
}


def train(how: str, device: torch.device) -> list[float]:
    """The loss of each step, averaged over all ranks."""
    model = WRAPPERS[how](new_model(device), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        batch = torch.randn(BATCH, WIDTH, generator=generator).to(device)
        if how != "tensor-parallel":
            batch = batch.chunk(dist.get_world_size())[dist.get_rank()]
        loss = nn.functional.mse_loss(model(batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        losses.append(mean.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--with", dest="how", choices=WRAPPERS, default="ddp")
    how = parser.parse_args().how
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(backend="nccl")
    losses = train(how, device)
    if dist.get_rank() == 0:
        print(f"{how} over {dist.group.WORLD}:", " ".join(f"{loss:.6f}" for loss in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
