"""`finalize_model_grads` for pipelines whose meshes have different shapes.

megatron-core reduces gradients within a stage. For tied embeddings and per-token loss scaling it
needs groups of one rank per stage, which meshes of different shapes do not have.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed import finalize_model_grads as finalize_stage

from hetero.pipeline.groups import Groups
from hetero.plan import Plan
from megatron.hetero.core_private import reduced_grad_range, rescale_gradients
from megatron.hetero.tied_embedding import TiedEmbedding


class FinalizeGradsAcrossMeshes:
    """`config.finalize_model_grads_func`: called by the schedules after the last backward pass.

    The constructor is collective over all ranks.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        chunks: Sequence[DistributedDataParallel],
        *,
        plan: Plan,
        rank: int,
        groups: Groups,
    ) -> None:
        here = plan.coordinate(rank)
        own, last = plan.meshes[here.mesh], plan.meshes[-1]
        if not args.calculate_per_token_loss:
            # A replica's loss is the mean over its own samples, so the sum of gradients over this
            # mesh's replicas has to be divided by the number of replicas of the last mesh.
            rescale_gradients(chunks, own.data / last.data, 1.0 / last.data)
        self._config, self._world = chunks[0].config, groups.world
        self._counts_tokens = here.tensor == 0
        self._embedding: TiedEmbedding | None = None
        if not args.untie_embeddings_and_output_weights and groups.embedding is not None:
            chunk = chunks[0] if here.stage == 0 else chunks[-1]
            weight = tied_weight(chunk, is_first=here.stage == 0)
            self._embedding = TiedEmbedding(
                weight,
                rows_before=here.tensor * weight.shape[0],
                owned=reduced_grad_range(chunk, weight),
                group=groups.embedding,
                first_stage_size=plan.meshes[0].ranks_per_stage,
            )

    def __call__(
        self,
        model: list[DistributedDataParallel],
        num_tokens: torch.Tensor | None = None,
        pg_collection: Any = None,
        force_all_reduce: bool = False,
    ) -> None:
        """`num_tokens` (--calculate-per-token-loss): counted by this rank, on the last stage."""
        finalize_stage(model, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
        if self._embedding is not None:
            timers = self._config.timers
            with timers("embedding-grads-all-reduce") if timers else nullcontext():
                self._embedding.add_gradients()
        if num_tokens is not None:
            total = self._all_reduce_tokens(num_tokens)
            if total:
                for chunk in model:
                    chunk.scale_gradients(1.0 / torch.tensor(total, device=num_tokens.device))

    def _all_reduce_tokens(self, num_tokens: torch.Tensor) -> int:
        """Tokens of the global batch. Collective over all ranks."""
        counted = num_tokens if self._counts_tokens else torch.zeros_like(num_tokens)
        total = counted.long().cpu()
        dist.all_reduce(total, group=self._world)
        return int(total)


def tied_weight(chunk: torch.nn.Module, *, is_first: bool) -> torch.nn.Parameter:
    """The first stage's embedding, or the last stage's output layer."""
    name = "embedding.word_embeddings.weight" if is_first else "output_layer.weight"
    return next(weight for full, weight in chunk.named_parameters() if full.endswith(name))
