"""DeepSpeed's ZeRO, as anyone has it: nothing here knows of vendors.

    python -m hetero.run --standalone --nproc-per-node 4 examples/collectives/deepspeed_zero.py

It learns which byte follows 16 others in a text: this file, unless --text names another. Needs the
extra `examples`. On a CPU set DS_ACCELERATOR=cpu.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

CONTEXT, HIDDEN, STEPS, BATCH = 16, 64, 5, 8


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(256, HIDDEN),
        nn.Flatten(),
        nn.Linear(CONTEXT * HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, 256),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--text", type=Path, default=Path(__file__))
    given = parser.parse_args()
    text = torch.frombuffer(bytearray(given.text.read_bytes()), dtype=torch.uint8)
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    model = new_model()
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        training_data=TensorDataset(text.long().unfold(0, CONTEXT + 1, 1)),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": given.stage},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": STEPS + 1,
        },
    )
    losses = []
    for _, (window,) in zip(range(STEPS), loader, strict=False):
        window = window.to(engine.device)
        loss = nn.functional.cross_entropy(engine(window[:, :-1]), window[:, -1])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        losses.append(mean.item())
    if dist.get_rank() == 0:
        print(f"losses over {dist.group.WORLD}:", " ".join(f"{loss:.6f}" for loss in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
