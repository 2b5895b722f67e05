"""DeepSpeed's ZeRO, as anyone has it: nothing here knows of vendors.

    python -m hetero.run --standalone --nproc-per-node 4 examples/collectives/deepspeed_zero.py

A LLaMA of Hugging Face's learns the bytes of a text: this file, unless --text names another. Needs
the extra `examples`. On a CPU set DS_ACCELERATOR=cpu.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM


def new_model(given: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=given.hidden,
            intermediate_size=4 * given.hidden,
            num_hidden_layers=given.layers,
            num_attention_heads=given.hidden // min(given.hidden, 128),
            max_position_embeddings=given.seq_length,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--text", type=Path, default=Path(__file__))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--seq-length", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=8, help="samples of each rank")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--bf16", action="store_true")
    given = parser.parse_args()
    text = torch.frombuffer(bytearray(given.text.read_bytes()), dtype=torch.uint8)
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    model = new_model(given)
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=given.lr),
        training_data=TensorDataset(text.long().unfold(0, given.seq_length, 1)),
        config={
            "train_micro_batch_size_per_gpu": given.batch_size,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": given.bf16},
            "zero_optimization": {"stage": given.stage},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": given.steps + 1,
        },
    )
    losses, seconds = [], []
    began = time.perf_counter()
    for _, (window,) in zip(range(given.steps), loader, strict=False):
        window = window.to(engine.device)
        loss = engine(window, labels=window).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        losses.append(mean.item())
        ended = time.perf_counter()
        seconds.append(ended - began)
        began = ended
    if dist.get_rank() == 0:
        print(f"losses over {dist.group.WORLD}:", " ".join(f"{loss:.6f}" for loss in losses))
        print(f"{1000 * statistics.median(seconds[given.steps // 3 :]):.2f} ms a step (median)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
