"""One rank of the peer: the same LLaMA in plain PyTorch.

Ranks that share a sequence have torch's own `context_parallel`: FSDP2, float32 weights computed in
bfloat16, every layer recomputed, as torchtitan trains. With --compiled one GPU: compiled layers,
weights, gradients and moments in bfloat16, which is less work than ours; --fp8 has torchao compute
the layers' linear layers in fp8. Started by bench/long_context.py and bench/fp8_speed.py; writes a
line of JSON for each step to the file that OUT names.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel


class Layer(nn.Module):
    """Attention with grouped queries and rotary positions, and a gated MLP."""

    def __init__(self, hidden: int, heads: int, groups: int, ffn: int) -> None:
        super().__init__()
        self.heads, self.groups, self.width = heads, groups, hidden // heads
        self.qkv = nn.Linear(hidden, (heads + 2 * groups) * self.width, bias=False)
        self.proj = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, eps=1e-5) for _ in range(2))

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        batch, rows, _ = x.shape
        sizes = [count * self.width for count in (self.heads, self.groups, self.groups)]
        query, key, value = (
            part.view(batch, rows, -1, self.width).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).split(sizes, -1)
        )
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        query, key = (_rotated(part, cos, sin) for part in (query, key))
        # context_parallel shares out whole heads alone, as torchtitan's models give it.
        key, value = (part.repeat_interleave(self.heads // self.groups, 1) for part in (key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, rows, -1))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


class Llama(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(args.vocabulary, args.hidden)
        layers = (Layer(args.hidden, args.heads, args.groups, args.ffn) for _ in range(args.layers))
        self.layers = nn.ModuleList(
            layers if args.compiled else (checkpoint_wrapper(layer) for layer in layers)
        )
        self.norm = nn.RMSNorm(args.hidden, eps=1e-5)
        self.output = nn.Linear(args.hidden, args.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, angles)
        logits: torch.Tensor = self.output(self.norm(x))
        return logits


def sharded(model: Llama, mesh: Any) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def compiled(model: Llama, fp8: str | None) -> None:
    model.to(torch.bfloat16)
    if fp8 is not None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(fp8)
        convert_to_float8_training(model.layers, config=config)
    for layer in model.layers:
        layer.compile()


def loss_of(
    model: Llama, tokens: torch.Tensor, angles: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    logits = model(tokens, angles)
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    sizes = ("layers", "hidden", "ffn", "heads", "groups", "vocabulary", "sequence", "steps")
    for name in sizes:
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--batch", type=int, default=1, help="number of micro-batches of a step")
    parser.add_argument("--micro", type=int, default=1, help="number of sequences of one")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--fp8")
    args = parser.parse_args()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if kind == "cuda" else "cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    size = dist.get_world_size()
    mesh = init_device_mesh(kind, (size,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    with torch.device(device):
        model = Llama(args)
    loss_function = loss_of
    if args.compiled:
        compiled(model, args.fp8)
        loss_function = torch.compile(loss_of)
    else:
        sharded(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=kind == "cuda")
    frequencies = 500_000.0 ** (
        -torch.arange(0, args.hidden // args.heads, 2, device=device) / (args.hidden // args.heads)
    )
    with open(os.environ["OUT"] if dist.get_rank() == 0 else os.devnull, "w") as out:
        for step in range(args.steps):
            _synchronize(kind)
            began = time.perf_counter()
            generator = torch.Generator(device).manual_seed(step)
            total = torch.zeros((), device=device)
            for _ in range(args.batch):
                shape = (args.micro, args.sequence + 1)
                text = torch.randint(args.vocabulary, shape, device=device, generator=generator)
                tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
                positions = torch.arange(args.sequence, device=device).float()
                angles = torch.outer(positions, frequencies)
                angles = torch.cat((angles, angles), -1)
                buffers = [tokens, labels, angles]
                with _shared(mesh, buffers) if size > 1 else nullcontext():
                    loss = loss_function(model, tokens, angles, labels)
                    (loss / args.batch).backward()
                total += loss.detach() / args.batch
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            _synchronize(kind)
            peak = torch.cuda.max_memory_allocated() if kind == "cuda" else 0
            record = {"seconds": time.perf_counter() - began, "peak": peak, "loss": total.item()}
            out.write(json.dumps(record) + "\n")
    dist.destroy_process_group()


def _shared(mesh: Any, buffers: list[torch.Tensor]) -> AbstractContextManager[Any]:
    """torch's context: SDPA becomes ring attention, and the buffers those of this rank's rows."""
    from torch.distributed.tensor.experimental import context_parallel

    stack = ExitStack()
    stack.enter_context(sdpa_kernel([SDPBackend.FLASH_ATTENTION]))
    stack.enter_context(
        context_parallel(
            mesh,
            buffers=buffers,
            buffer_seq_dims=[1, 1, 0],
            no_restore_buffers=set(buffers),
        )
    )
    return stack


def _synchronize(kind: str) -> None:
    if kind == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
