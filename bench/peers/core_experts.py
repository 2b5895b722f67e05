"""The peer: a mixture of experts in plain megatron-core, which computes experts one by one.

Its local layers with its SequentialMLP, its alltoall dispatcher, its DDP and distributed optimizer,
on one GPU. Only attention is torch's, as in our layers: without it megatron-core would hold the
scores of whole sequences. Started by bench/expert_speed.py; writes a line of JSON for each step to
the file that OUT names.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig


class TorchAttention(MegatronModule):
    """Causal attention by torch, of queries, keys and values (s, b, heads or groups, d)."""

    def __init__(self, config: TransformerConfig, *_: Any, **__: Any) -> None:
        super().__init__(config=config)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        sequence, batch = query.shape[:2]
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        attended = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        return attended.permute(2, 0, 1, 3).reshape(sequence, batch, -1)


def build(args: argparse.Namespace) -> tuple[DistributedDataParallel, Any]:
    """The model, and its optimizer."""
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.heads,
        num_query_groups=args.groups,
        kv_channels=args.channels,
        ffn_hidden_size=args.ffn,
        moe_ffn_hidden_size=args.ffn,
        num_moe_experts=args.experts,
        moe_router_topk=args.topk,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=1e-3,
        moe_token_dispatcher_type="alltoall",
        qk_layernorm=True,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.bfloat16,
        bf16=True,
        pipeline_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        cross_entropy_loss_fusion=True,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=args.experts, qk_layernorm=True, normalization="RMSNorm"
    )
    spec.submodules.self_attention.submodules.core_attention = TorchAttention
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.vocabulary,
        max_sequence_length=args.sequence,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=1_000_000,
        pg_collection=groups,
    ).cuda()
    wrapped = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
        Float16Module(config, model),
        pg_collection=groups,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-4,
            clip_grad=1.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
        ),
        [wrapped],
        use_gloo_process_groups=False,
    )
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = wrapped.no_sync
    return wrapped, optimizer


def forward_step(args: argparse.Namespace) -> Callable[..., Any]:
    generator = torch.Generator(device="cuda").manual_seed(0)
    positions = torch.arange(args.sequence, device="cuda")[None]

    def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = losses.float().mean()
        return mean, {"lm loss": mean.detach()}

    def step(_data: Any, model: torch.nn.Module) -> Any:
        shape = (1, args.sequence + 1)
        ids = torch.randint(0, args.vocabulary, shape, device="cuda", generator=generator)
        return model(ids[:, :-1], positions, None, labels=ids[:, 1:].contiguous()), loss_of

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    sizes = "layers hidden heads groups channels ffn experts topk sequence batch vocabulary steps"
    for name in sizes.split():
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    # Its routers read it, and without TransformerEngine 0.16 does not define it.
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
    model, optimizer = build(args)
    run, step = get_forward_backward_func(), forward_step(args)
    with Path(os.environ["OUT"]).open("w") as file:
        for _ in range(args.steps):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            model.zero_grad_buffer()
            optimizer.zero_grad()
            losses = run(
                forward_step_func=step,
                data_iterator=repeat(None),
                model=model,
                num_microbatches=args.batch,
                seq_length=args.sequence,
                micro_batch_size=1,
            )
            optimizer.step()
            torch.cuda.synchronize()
            row = {
                "seconds": time.perf_counter() - begun,
                "loss": torch.stack([each["lm loss"] for each in losses]).mean().item(),
                "peak": torch.cuda.max_memory_allocated(),
            }
            print(json.dumps(row), file=file, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
