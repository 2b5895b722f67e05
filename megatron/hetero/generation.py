"""Text generation from a checkpoint of any layout, in one process and with a KV cache.

The KV cache is used as long as the text fits the model's maximum sequence length.
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
from megatron.hetero.arguments.parser import build_parser
from megatron.hetero.checkpoint.model_flags import MODEL_FLAGS, Kind, spellings
from megatron.hetero.checkpoint.reader import CheckpointReader, TensorRead
from megatron.hetero.checkpoint.regions import Region
from megatron.hetero.checkpoint.tensor_names import EMBEDDING, stored_name
from megatron.hetero.core_private import single_process_groups
from megatron.hetero.cpu_shim import cpu_shim
from megatron.hetero.model import build_chunk, transformer_config
from megatron.hetero.tokenizer.files import own_tokenizer
from megatron.hetero.weights import named_buffers, named_parameters

_MIN_CACHE_TOKENS = 256
"""Initial capacity of the KV cache."""
# Flags whose value does not come from the run that wrote the checkpoint.
_INFERENCE_OVERRIDES: Mapping[str, Any] = {
    "tensor_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "context_parallel_size": 1,
    "mtp_num_layers": None,
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
    """Sampling parameters. Temperature 0 is greedy; `top_k` or `top_p` 0 disables the filter."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0


def checkpoint_args(reader: CheckpointReader) -> argparse.Namespace:
    """The arguments of the run that wrote a checkpoint, with the checkpoint's own tokenizer.

    Flags that the checkpoint does not record get their defaults. Raises UserError if such a flag
    determines a tensor's shape.
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
    for name, value in {**reader.args, **own_tokenizer(reader.args, reader.folder)}.items():
        setattr(args, name, value)
    return args


@contextmanager
def whole_model(
    reader: CheckpointReader, *, dtype: torch.dtype | None = None
) -> Iterator[GPTModel]:
    """Load a checkpoint's whole model for inference, on GPU 0 if there is one, else on the CPU.

    `dtype` is the weights' dtype, by default the checkpoint's. Raises HeteroError.
    """
    args = checkpoint_args(reader)
    for name, value in _INFERENCE_OVERRIDES.items():
        setattr(args, name, value)
    dtype = dtype or reader.dtype(EMBEDDING)
    args.params_dtype = str(dtype).removeprefix("torch.")
    args.bf16, args.fp16 = dtype == torch.bfloat16, dtype == torch.float16
    args.padded_vocab_size = reader.shape(EMBEDDING)[0]
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    with (
        cpu_shim(),
        torch.inference_mode(),
        single_process_groups(args.num_layers) as (plan, collection),
    ):
        model = build_chunk(
            args,
            transformer_config(args, plan, device),
            plan=plan,
            coordinate=plan.coordinate(0),
            chunk=0,
            groups=collection,
        ).to(device)
        model.eval()
        _load_weights(model, reader)
        yield model


def _load_weights(model: GPTModel, reader: CheckpointReader) -> None:
    reads = []
    for name, parameter in (*named_parameters([model], [0]), *named_buffers([model], [0])):
        stored = stored_name(name)
        if stored not in reader.index.tensors or reader.shape(stored) != tuple(parameter.shape):
            raise UserError(
                f"the checkpoint {reader.folder} has no tensor {stored} of the shape "
                f"{list(parameter.shape)}, which its own arguments require"
            )
        regions = [Region.whole(tuple(parameter.shape))]
        reads.append(TensorRead(parameter.view(-1), stored, regions))
    reader.read_into(reads)


def next_logits(model: GPTModel, tokens: Sequence[int]) -> torch.Tensor:
    """Logits after each of `tokens`, without a KV cache: float32 (tokens, padded vocabulary)."""
    device = next(model.parameters()).device
    ids = torch.tensor([list(tokens)], device=device)
    positions = torch.arange(ids.shape[1], device=device)[None]
    logits: torch.Tensor = model(ids, positions, None)
    return logits[0].float()


class CachedLogits:
    """Incremental decoding of one sequence with a KV cache."""

    def __init__(self, model: GPTModel) -> None:
        self._model = model
        self._seen = self._capacity = 0
        self._context: StaticInferenceContext | None = None

    def logits_after(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits after the last token: float32 (padded vocabulary,).

        `tokens` must begin with the tokens of the previous call.
        """
        if self._context is None or len(tokens) > self._capacity:
            # Double the capacity, so that few calls have to recompute the whole prefix.
            self._capacity = max(_MIN_CACHE_TOKENS, 2 * len(tokens))
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
        """Attention mask, True where masked out; None for the first pass, which is causal."""
        if self._seen == 0:
            return None
        mask = torch.ones(total - self._seen, total, dtype=torch.bool, device=device)
        return mask.triu(1 + self._seen)[None, None]


def generate(
    model: GPTModel,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    max_context: int,
    vocab_size: int,
    seed: int = 0,
) -> Iterator[int]:
    """Yield sampled token ids below `vocab_size`, endlessly.

    The model sees the last `max_context` tokens. Once the text is longer, positions shift with
    every token, which invalidates the KV cache: each token then costs a full forward pass. Raises
    UserError for an empty prompt.
    """
    if not prompt:
        raise UserError("the prompt has no tokens; give at least one word")
    generator = torch.Generator().manual_seed(seed)
    tokens, cached = list(prompt), CachedLogits(model)
    while True:
        fits = len(tokens) <= max_context
        logits = (
            cached.logits_after(tokens) if fits else next_logits(model, tokens[-max_context:])[-1]
        )
        chosen = sample_token(logits[:vocab_size].cpu(), sampling, generator)
        tokens.append(chosen)
        yield chosen


def sample_token(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Sample one token id from the logits of one position."""
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    scaled = logits / sampling.temperature
    if sampling.top_k:
        least = scaled.topk(min(sampling.top_k, scaled.numel())).values[-1]
        scaled = scaled.masked_fill(scaled < least, float("-inf"))
    probabilities = scaled.softmax(-1)
    if sampling.top_p:
        ordered, ids = probabilities.sort(descending=True)
        # Keep the most likely token, and the one with which the sum reaches top_p.
        beyond = ordered.cumsum(-1) - ordered >= sampling.top_p
        probabilities[ids[beyond]] = 0.0
    return int(torch.multinomial(probabilities, 1, generator=generator))
