"""Hugging Face's `Trainer`, as anyone has it: nothing here knows of vendors.

    python -m hetero.run --standalone --nproc-per-node 4 examples/collectives/huggingface_trainer.py

A small LLaMA learns the bytes of a text: this file, unless --text names another. Needs the extra
`examples`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

LENGTH, STEPS = 64, 5


def new_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", type=Path, default=Path(__file__))
    text = torch.frombuffer(bytearray(parser.parse_args().text.read_bytes()), dtype=torch.uint8)
    samples = [{"input_ids": w, "labels": w} for w in text.long().unfold(0, LENGTH, LENGTH)]
    on_gpu = torch.cuda.is_available()
    set_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            ddp_backend="nccl" if on_gpu else "gloo",
            use_cpu=not on_gpu,
            per_device_train_batch_size=4,
            max_steps=STEPS,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=new_model(), args=arguments, train_dataset=samples, eval_dataset=samples
        )
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        group = torch.distributed.group.WORLD
        print(f"losses over {group}:", " ".join(f"{loss:.6f}" for loss in [*losses, evaluated]))


if __name__ == "__main__":
    main()
