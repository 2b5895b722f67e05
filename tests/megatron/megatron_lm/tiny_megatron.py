"""Tiny GPTs with random weights, as checkpoints of ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.hetero.checkpoint.conversion import write_checkpoint, write_release
from megatron.hetero.checkpoint.reader import CheckpointReader
from megatron.hetero.checkpoint.safetensors_writer import WriteItem
from megatron.hetero.checkpoint.tensor_names import optimizer_name
from megatron.hetero.megatron_lm.tensors import model_tensors

LLAMA: Mapping[str, Any] = {
    "num_layers": 4,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 4,
    "kv_channels": 4,
    "seq_length": 8,
    "max_position_embeddings": 8,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-5,
    "layernorm_zero_centered_gamma": False,
    "swiglu": True,
    "squared_relu": False,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "untie_embeddings_and_output_weights": True,
    "padded_vocab_size": 32,
    "make_vocab_size_divisible_by": 8,
    "optimizer": "adam",
    "lr": 1e-3,
    "min_lr": 1e-4,
    "weight_decay": 0.1,
}
QWEN = {**LLAMA, "add_qkv_bias": True, "untie_embeddings_and_output_weights": False}
GPT2 = {
    **LLAMA,
    "group_query_attention": False,
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "swiglu": False,
    "add_bias_linear": True,
    "qk_layernorm": True,
    "untie_embeddings_and_output_weights": False,
}
MODELS = {"llama": LLAMA, "qwen": QWEN, "gpt2": GPT2}
SCHEDULE = {
    "max_lr": 1e-3,
    "lr_warmup_steps": 4,
    "num_steps": 12,
    "lr_decay_style": "cosine",
    "lr_decay_steps": 32,
    "min_lr": 1e-4,
    "start_wd": 0.1,
    "end_wd": 0.1,
    "wd_incr_style": "constant",
    "wd_incr_steps": 32,
}


def weights(args: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Random weights of the whole model by our names."""
    generator = torch.Generator().manual_seed(3)
    return {
        tensor.name: torch.randn(tensor.shape, generator=generator).to(dtype)
        for tensor in model_tensors(args, rows=args["padded_vocab_size"])
    }


def save_weights(save: Path, args: Mapping[str, Any], found: Mapping[str, torch.Tensor]) -> None:
    write_release(save, [[WriteItem.whole(n, t) for n, t in found.items()]], args=args)


def save_training(
    save: Path,
    args: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    changed: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """A checkpoint of iteration 3 with Adam's state; every tensor of it.

    `changed` replaces some of them.
    """
    generator = torch.Generator().manual_seed(4)
    found = {}
    for name, weight in weights(args).items():
        found[name] = weight.to(dtype)
        if dtype != torch.float32:
            found[optimizer_name("main", name)] = weight
        for moment in ("exp_avg", "exp_avg_sq"):
            found[optimizer_name(moment, name)] = torch.rand(weight.shape, generator=generator)
    found |= changed or {}
    run = {
        "iteration": 3,
        "consumed_train_samples": 12,
        "holds": {"optimizer": True, "random states": False},
        "scheduler": SCHEDULE,
        "loss_scaler": {},
        "optimizer_step": 3,
    }
    precision = {"bf16": dtype == torch.bfloat16, "fp16": False}
    write_checkpoint(
        save,
        "iter_0000003",
        [[WriteItem.whole(n, t) for n, t in found.items()]],
        args={**args, **precision},
        run=run,
    )
    return found


def read(save: Path) -> dict[str, torch.Tensor]:
    with CheckpointReader.open(save) as reader:
        return {name: reader.tensor(name) for name in reader.index.tensors}


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
