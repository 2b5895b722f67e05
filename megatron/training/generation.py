"""A checkpoint's whole model in one process, and the text that it writes.

Any layout will do: a checkpoint's tensors are those of the whole model. Keys and values of the
tokens before are kept, as long as the text is not longer than the model's positions go.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.gpt.gpt_model import GPTModel

from hetero.errors import UserError
from megatron.training.arguments.parser import build_parser
from megatron.training.checkpoint.model_flags import MODEL_FLAGS, Kind, spellings
from megatron.training.checkpoint.reader import CheckpointReader
from megatron.training.checkpoint.tensor_names import EMBEDDING, stored_name
from megatron.training.cpu_shim import cpu_shim
from megatron.training.lone_process import lone_groups
from megatron.training.model import build_chunk, transformer_config

_SMALLEST_CACHE = 256
"""Tokens that the first cache of keys and values has room for."""
# What one process without gradients does differently from the run that wrote the checkpoint.
_LONE_PROCESS: Mapping[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "sequence_parallel": False,
    "transformer_impl": "local",
    "attention_backend": "auto",
    "recompute_granularity": None,
    "cross_entropy_loss_fusion": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "fp32_residual_connection": False,
}


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. Temperature 0 takes the likeliest; 0 of `top_k` or `top_p`, all."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0


def checkpoint_args(reader: CheckpointReader) -> argparse.Namespace:
    """Every flag as the run that wrote a checkpoint had it.

    A flag that it does not mention has its default, because its writer did not have it. Raises
    UserError for one that decides a shape.
    """
    parser = build_parser()
    missing = [
        spelling.option
        for name, spelling in spellings(parser).items()
        if MODEL_FLAGS[name].kind is Kind.SHAPE and name not in reader.args
    ]
    if missing:
        raise UserError(
            f"the checkpoint {reader.folder} does not say {', '.join(missing)}, without which its "
            "model cannot be built; write it again with this version"
        )
    args = parser.parse_args([])
    for name, value in reader.args.items():
        setattr(args, name, value)
    return args


@contextmanager
def whole_model(
    reader: CheckpointReader, *, dtype: torch.dtype | None = None
) -> Iterator[GPTModel]:
    """The model, ready to be called in this process: on its GPU where it has one, or its CPU.

    `dtype` is that of the weights, the checkpoint's own where left out. Raises HeteroError.
    """
    args = checkpoint_args(reader)
    for name, value in _LONE_PROCESS.items():
        setattr(args, name, value)
    dtype = dtype or reader.dtype(EMBEDDING)
    args.params_dtype = str(dtype).removeprefix("torch.")
    args.bf16, args.fp16 = dtype == torch.bfloat16, dtype == torch.float16
    args.padded_vocab_size = reader.shape(EMBEDDING)[0]
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    with cpu_shim(), torch.inference_mode(), lone_groups(args.num_layers) as (plan, collection):
        model = build_chunk(
            args,
            transformer_config(args, plan, device),
            plan=plan,
            coordinate=plan.coordinate(0),
            chunk=0,
            groups=collection,
        ).to(device)
        model.eval()
        _fill(model, reader)
        yield model


def _fill(model: GPTModel, reader: CheckpointReader) -> None:
    for name, parameter in model.named_parameters():
        stored = stored_name(name)
        if stored not in reader.index.tensors or reader.shape(stored) != tuple(parameter.shape):
            raise UserError(
                f"the checkpoint {reader.folder} has no tensor {stored} of the shape "
                f"{list(parameter.shape)}, which its own arguments ask for"
            )
        parameter.copy_(reader.tensor(stored))


def next_logits(model: GPTModel, tokens: Sequence[int]) -> torch.Tensor:
    """float32 logits of every row of the vocabulary after each of `tokens`: (tokens, rows)."""
    device = next(model.parameters()).device
    ids = torch.tensor([list(tokens)], device=device)
    positions = torch.arange(ids.shape[1], device=device)[None]
    logits: torch.Tensor = model(ids, positions, None)
    return logits[0].float()


class CachedLogits:
    """The logits after the last token of a text that grows, without a second pass over the rest."""

    def __init__(self, model: GPTModel) -> None:
        self._model = model
        self._seen = self._capacity = 0
        self._context: StaticInferenceContext | None = None

    def after(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32 logits of every row of the vocabulary; `tokens` begin with those of before."""
        if self._context is None or len(tokens) > self._capacity:
            # Room for as much again, so that few of the passes begin anew.
            self._capacity = max(_SMALLEST_CACHE, 2 * len(tokens))
            self._context, self._seen = StaticInferenceContext(1, self._capacity), 0
        device = next(self._model.parameters()).device
        ids = torch.tensor([list(tokens[self._seen :])], device=device)
        positions = torch.arange(self._seen, len(tokens), device=device)[None]
        self._context.sequence_len_offset = self._seen
        logits: torch.Tensor = self._model(
            ids,
            positions,
            self._mask(len(tokens), device),
            inference_context=self._context,
            runtime_gather_output=True,
        )
        self._seen = len(tokens)
        return logits[0, -1].float()

    def _mask(self, total: int, device: torch.device) -> torch.Tensor | None:
        """True where attention is forbidden; a first pass is causal, which needs no mask."""
        if self._seen == 0:
            return None
        mask = torch.ones(total - self._seen, total, dtype=torch.bool, device=device)
        return mask.triu(1 + self._seen)[None, None]


def generate(
    model: GPTModel,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    longest: int,
    vocabulary: int,
    seed: int = 0,
) -> Iterator[int]:
    """Token after token, without end, of ids below `vocabulary`.

    The model sees the `longest` last tokens, which is as far as its positions go. Beyond, every
    token costs a pass over all of them: with each the positions of the others move.
    """
    if not prompt:
        raise UserError("the prompt has no tokens; give at least one word")
    generator = torch.Generator().manual_seed(seed)
    tokens, cached = list(prompt), CachedLogits(model)
    while True:
        fits = len(tokens) <= longest
        logits = cached.after(tokens) if fits else next_logits(model, tokens[-longest:])[-1]
        chosen = choose(logits[:vocabulary].cpu(), sampling, generator)
        tokens.append(chosen)
        yield chosen


def choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token from the logits of one position."""
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    scaled = logits / sampling.temperature
    if sampling.top_k:
        least = scaled.topk(min(sampling.top_k, scaled.numel())).values[-1]
        scaled = scaled.masked_fill(scaled < least, float("-inf"))
    probabilities = scaled.softmax(-1)
    if sampling.top_p:
        ordered, ids = probabilities.sort(descending=True)
        # The first is always kept, and so is the one that reaches the sum.
        beyond = ordered.cumsum(-1) - ordered >= sampling.top_p
        probabilities[ids[beyond]] = 0.0
    return int(torch.multinomial(probabilities, 1, generator=generator))
