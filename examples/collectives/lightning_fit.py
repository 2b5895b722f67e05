"""A Lightning module and `Trainer`, as anyone has them: nothing here knows of vendors.

    python -m hetero.run --standalone --nproc-per-node 4 examples/collectives/lightning_fit.py

It learns which byte follows 16 others in a text: this file, unless --text names another. Needs the
extra `examples`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CONTEXT, HIDDEN, STEPS = 16, 64, 5


class NextByte(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Embedding(256, HIDDEN),
            nn.Flatten(),
            nn.Linear(CONTEXT * HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, 256),
        )
        self.losses: list[float] = []

    def training_step(self, batch: tuple[torch.Tensor], _: int) -> torch.Tensor:
        (window,) = batch
        loss = nn.functional.cross_entropy(self.layers(window[:, :-1]), window[:, -1])
        self.log("loss", loss, sync_dist=True)
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", type=Path, default=Path(__file__))
    text = torch.frombuffer(bytearray(parser.parse_args().text.read_bytes()), dtype=torch.uint8)
    windows = text.long().unfold(0, CONTEXT + 1, 1)
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        strategy=DDPStrategy(process_group_backend="nccl" if torch.cuda.is_available() else "gloo"),
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = NextByte()
    trainer.fit(model, DataLoader(TensorDataset(windows), batch_size=16))
    if trainer.is_global_zero:
        group = torch.distributed.group.WORLD
        print(f"losses over {group}:", " ".join(f"{loss:.6f}" for loss in model.losses))
    # Lightning leaves the group, and gloo may then abort the process at its exit.
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
