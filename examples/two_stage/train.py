"""Train a model of two stages on two ranks, without Megatron: one link, no process group.

    torchrun --nproc-per-node 2 examples/two_stage/train.py    # each stage on a rank of its own
    python examples/two_stage/train.py                         # both stages in one process

Both print the same losses and weights, bit for bit. On two hosts, which may have GPUs of two
vendors, start it on each, with N 0 on the one whose address is HOST and 1 on the other:

    torchrun --nnodes 2 --node-rank N --nproc-per-node 1 --master-addr HOST \\
        examples/two_stage/train.py

The model learns which byte follows 32 others in a text: this file, unless --text names another.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

if __name__ == "__main__":
    # As a script, only this file's folder would be importable.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hetero
from hetero.text import integer
from hetero.tools.tool_command_line import Parser

CONTEXT, HIDDEN = 32, 128
MICRO_BATCH, MICRO_BATCHES = 16, 4


@dataclass(frozen=True)
class Run:
    """What all ranks have alike."""

    text: torch.Tensor
    """Bytes."""
    steps: int
    device: torch.device

    def micro_batches(self, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Bytes (micro-batch, context), and the byte that follows each line of them."""
        generator = torch.Generator().manual_seed(step)
        for _ in range(MICRO_BATCHES):
            begins = torch.randint(len(self.text) - CONTEXT, (MICRO_BATCH,), generator=generator)
            inputs = torch.stack([self.text[begin : begin + CONTEXT] for begin in begins.tolist()])
            targets = self.text[begins + CONTEXT]
            yield inputs.long().to(self.device), targets.long().to(self.device)


def make_stages(device: torch.device) -> tuple[nn.Module, nn.Module]:
    """Both stages with the weights that every rank draws alike."""
    torch.manual_seed(0)
    first = nn.Sequential(
        nn.Embedding(256, HIDDEN), nn.Flatten(), nn.Linear(CONTEXT * HIDDEN, HIDDEN), nn.GELU()
    )
    second = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, 256))
    return first.to(device), second.to(device)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """This micro-batch's share of the loss."""
    return nn.functional.cross_entropy(logits, targets) / MICRO_BATCHES


def train_alone(run: Run) -> None:
    first, second = make_stages(run.device)
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()])
    for step in range(run.steps):
        losses = []
        for inputs, targets in run.micro_batches(step):
            loss = loss_of(second(first(inputs)), targets)
            loss.backward()
            losses.append(loss.detach())
        finish_step(optimizer)
        print_loss(step, losses)
    print_weights(0, first)
    print_weights(1, second)


def train_first(run: Run, link: hetero.Link) -> None:
    """The first stage: activations go to the other rank, their gradients come back."""
    stage = make_stages(run.device)[0]
    optimizer = torch.optim.AdamW(stage.parameters())
    for step in range(run.steps):
        outputs = []
        for inputs, _ in run.micro_batches(step):
            output = stage(inputs)
            link.send(output)
            outputs.append(output)
        for output in outputs:
            gradient = torch.empty_like(output)
            link.recv(gradient).wait()
            output.backward(gradient)
        finish_step(optimizer, link)
    print_weights(0, stage)


def train_second(run: Run, link: hetero.Link) -> None:
    """The second stage, which knows the loss."""
    stage = make_stages(run.device)[1]
    optimizer = torch.optim.AdamW(stage.parameters())
    for step in range(run.steps):
        losses = []
        for _, targets in run.micro_batches(step):
            activation = torch.empty(MICRO_BATCH, HIDDEN, device=run.device, requires_grad=True)
            link.recv(activation).wait()
            loss = loss_of(stage(activation), targets)
            loss.backward()
            assert activation.grad is not None
            link.send(activation.grad)
            losses.append(loss.detach())
        finish_step(optimizer, link)
        print_loss(step, losses)
    print_weights(1, stage)


def finish_step(optimizer: torch.optim.Optimizer, link: hetero.Link | None = None) -> None:
    """Update the weights, unless the link has failed: what came over it may then be garbage."""
    if link is not None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        link.check()
    optimizer.step()
    optimizer.zero_grad()


def print_loss(step: int, losses: list[torch.Tensor]) -> None:
    print(f"step {step}: loss {torch.stack(losses).sum().item()!r}", flush=True)


def print_weights(number: int, stage: nn.Module) -> None:
    weights = torch.cat([parameter.detach().cpu().flatten() for parameter in stage.parameters()])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    print(f"stage {number}: weights {digest}", flush=True)


def main() -> None:
    parser = Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=integer(1), default=50)
    parser.add_argument("--text", type=Path, default=Path(__file__))
    arguments = parser.parse_args()
    # More threads would add up in another order, and so round otherwise, on hosts of more cores.
    torch.set_num_threads(1)
    try:
        text = torch.frombuffer(bytearray(arguments.text.read_bytes()), dtype=torch.uint8)
    except (OSError, ValueError) as error:
        parser.error(f"--text {arguments.text} cannot be read ({error})")
    if len(text) <= CONTEXT:
        parser.error(f"--text {arguments.text} has {len(text)} bytes; it needs {CONTEXT + 1}")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    run = Run(text=text, steps=arguments.steps, device=device)
    if "RANK" not in os.environ:
        train_alone(run)
        return
    store, rank, world_size = next(iter(dist.rendezvous("env://")))
    if world_size != 2:
        parser.error(f"the model has two stages, so it takes two ranks and not {world_size}")
    with hetero.connect(store, rank=rank, peer=1 - rank, device=device) as link:
        (train_first, train_second)[rank](run, link)


if __name__ == "__main__":
    try:
        main()
    except hetero.LinkError as error:
        sys.exit(f"error: {error}")
