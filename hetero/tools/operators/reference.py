"""The same model from plain formulas, in float64 on the CPU, told to a tape operator by operator.

Activations are (sequence, batch, ...), as megatron-core has them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from hetero.observe.operators import formulas, operator_list
from hetero.observe.operators.tape import Tape

# LLaMA 3.1's: the context its frequencies were made for, and the two wavelengths, as parts of it,
# between which they are stretched by degrees.
_OLD_CONTEXT, _LONG_WAVES, _SHORT_WAVES = 8192, 1.0, 4.0


def rotary_angles(args: argparse.Namespace) -> torch.Tensor:
    """Radians of every position and channel, float64: (sequence, 1, 1, rotated channels)."""
    width = int(args.kv_channels * args.rotary_percent)
    frequencies = []
    for channel in range(0, width, 2):
        frequency = float(args.rotary_base) ** (-channel / width)
        if args.use_rope_scaling:
            frequency = _scaled_frequency(frequency, args.rope_scaling_factor)
        frequencies.append(frequency)
    positions = torch.arange(args.seq_length, dtype=torch.float64)
    positions /= args.rotary_seq_len_interpolation_factor or 1
    angles = positions[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    both = angles.repeat_interleave(2, -1) if args.rotary_interleaved else angles.repeat(1, 2)
    return both[:, None, None, :]


def _scaled_frequency(frequency: float, factor: float) -> float:
    turns = _OLD_CONTEXT * frequency / (2 * math.pi)
    kept = min(1.0, max(0.0, (turns - _LONG_WAVES) / (_SHORT_WAVES - _LONG_WAVES)))
    return frequency * (kept + (1.0 - kept) / factor)


class Reference:
    """A model with `parameters`, float64 by their global names."""

    def __init__(self, args: argparse.Namespace, parameters: Mapping[str, torch.Tensor]) -> None:
        self._args = args
        self._parameters = parameters

    def run(self, tape: Tape, *, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of every token: (batch, sequence)."""
        hidden = self._embedding(tape, tokens)
        angles = None
        if self._args.position_embedding_type == "rope":
            computed = rotary_angles(self._args)
            tape.outputs(operator_list.ANGLES, {"output": computed})
            angles = tape.angles(computed)
        layers = {name.split(".")[2] for name in self._parameters if ".layers." in name}
        for layer in range(len(layers)):
            hidden = self._layer(tape, layer, hidden, angles)
        hidden = self._norm(tape, operator_list.FINAL_NORM, "decoder.final_layernorm", hidden)
        logits = self._output_layer(tape, hidden)
        logits = tape.inputs(operator_list.LOSS, logits=logits)["logits"]
        loss = F.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none")
        tape.outputs(operator_list.LOSS, {"loss": loss})
        return loss

    def _embedding(self, tape: Tape, tokens: torch.Tensor) -> torch.Tensor:
        prefix = "embedding."
        used = {
            name.removeprefix(prefix): parameter
            for name, parameter in self._parameters.items()
            if name.startswith(prefix)
        }
        rows = F.embedding(tokens, used["word_embeddings.weight"])
        if "position_embeddings.weight" in used:
            rows = rows + used["position_embeddings.weight"][: tokens.shape[1]]
        output = rows.transpose(0, 1)
        tape.outputs(operator_list.EMBEDDING, {"output": output}, used)
        return output

    def _output_layer(self, tape: Tape, hidden: torch.Tensor) -> torch.Tensor:
        given = tape.inputs(operator_list.OUTPUT_LAYER, hidden=hidden)["hidden"]
        weight = self._parameters.get("output_layer.weight")
        if weight is None:
            weight = self._parameters["embedding.word_embeddings.weight"]
        logits = F.linear(given, weight)
        tape.outputs(operator_list.OUTPUT_LAYER, {"output": logits}, {"weight": weight})
        return logits

    def _layer(
        self, tape: Tape, layer: int, hidden: torch.Tensor, angles: torch.Tensor | None
    ) -> torch.Tensor:
        def name(operator: str) -> str:
            return operator_list.layer_operator(layer, operator)

        modules = f"decoder.layers.{layer}"
        attention, mlp = f"{modules}.self_attention", f"{modules}.mlp"
        normed = self._norm(tape, name("input_layernorm"), f"{modules}.input_layernorm", hidden)
        qkv = self._linear(
            tape, name("linear_qkv"), f"{attention}.linear_qkv", normed, adds_bias=True
        )
        heads = self._heads(tape, name, attention, qkv, angles)
        context = self._attention(tape, name("core_attention"), *heads)
        branch = self._linear(tape, name("linear_proj"), f"{attention}.linear_proj", context)
        hidden = self._residual(
            tape, name("attention_residual"), f"{attention}.linear_proj", branch, hidden
        )
        normed = self._norm(tape, name("pre_mlp_layernorm"), f"{modules}.pre_mlp_layernorm", hidden)
        wide = self._linear(tape, name("linear_fc1"), f"{mlp}.linear_fc1", normed)
        active = self._activation(tape, name("activation"), f"{mlp}.linear_fc1", wide)
        branch = self._linear(tape, name("linear_fc2"), f"{mlp}.linear_fc2", active)
        return self._residual(tape, name("mlp_residual"), f"{mlp}.linear_fc2", branch, hidden)

    def _norm(self, tape: Tape, operator: str, module: str, hidden: torch.Tensor) -> torch.Tensor:
        x = tape.inputs(operator, hidden=hidden)["hidden"]
        used = {"weight": self._parameters[f"{module}.weight"]}
        if self._args.normalization == "LayerNorm":
            used["bias"] = self._parameters[f"{module}.bias"]
        output = formulas.norm(
            x,
            used["weight"],
            used.get("bias"),
            epsilon=self._args.layernorm_epsilon,
            is_centred="bias" in used,
            is_zero_centred=self._args.layernorm_zero_centered_gamma,
        )
        tape.outputs(operator, {"output": output}, used)
        return output

    def _linear(
        self,
        tape: Tape,
        operator: str,
        module: str,
        hidden: torch.Tensor,
        *,
        adds_bias: bool = False,
    ) -> torch.Tensor:
        x = tape.inputs(operator, hidden=hidden)["hidden"]
        used = {"weight": self._parameters[f"{module}.weight"]}
        if adds_bias:
            used |= self._bias(module)
        output = F.linear(x, used["weight"], used.get("bias"))
        tape.outputs(operator, {"output": output}, used)
        return output

    def _bias(self, module: str) -> dict[str, torch.Tensor]:
        bias = self._parameters.get(f"{module}.bias")
        return {} if bias is None else {"bias": bias}

    def _residual(
        self,
        tape: Tape,
        operator: str,
        module: str,
        branch: torch.Tensor,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        given = tape.inputs(operator, branch=branch, residual=residual)
        used = self._bias(module)
        output = given["residual"] + given["branch"] + used.get("bias", 0.0)
        tape.outputs(operator, {"output": output}, used)
        return output

    def _activation(
        self, tape: Tape, operator: str, module: str, hidden: torch.Tensor
    ) -> torch.Tensor:
        x = tape.inputs(operator, hidden=hidden)["hidden"]
        used = self._bias(module)
        x = x + used.get("bias", 0.0)
        output = formulas.activation(x, formulas.activation_name(self._args))
        tape.outputs(operator, {"output": output}, used)
        return output

    def _heads(
        self,
        tape: Tape,
        name: Callable[[str], str],
        attention: str,
        qkv: torch.Tensor,
        angles: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value; the projection holds them query group by query group."""
        rotary, width = name("rotary"), self._args.kv_channels
        qkv = tape.inputs(rotary, qkv=qkv)["qkv"]
        groups = self._args.num_attention_heads
        if self._args.group_query_attention:
            groups = self._args.num_query_groups
        query, key, value = formulas.split_heads(qkv, groups=groups, width=width)
        before = {}
        if self._args.qk_layernorm:
            before = {"query before norm": query, "key before norm": key}
            query = self._norm(tape, name("q_layernorm"), f"{attention}.q_layernorm", query)
            query = tape.inputs(rotary, query=query)["query"]
            key = self._norm(tape, name("k_layernorm"), f"{attention}.k_layernorm", key)
            key = tape.inputs(rotary, key=key)["key"]
        if angles is not None:
            turned = self._args.rotary_interleaved
            query = formulas.rotate(query, angles, is_interleaved=turned)
            key = formulas.rotate(key, angles, is_interleaved=turned)
        tape.outputs(rotary, {"query": query, "key": key, "value": value, **before})
        return query, key, value

    def _attention(
        self,
        tape: Tape,
        operator: str,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        given = tape.inputs(operator, query=query, key=key, value=value)
        query, key, value = given["query"], given["key"], given["value"]
        sequence, batch, heads, _ = query.shape
        shared = heads // key.shape[2]
        forbidden = torch.ones(sequence, sequence, dtype=torch.bool).triu(1)
        # Head by head, and again in the backward pass: all scores at once may not fit in memory.
        context = [
            checkpoint(
                _one_head,
                query[:, b, head],
                key[:, b, head // shared],
                value[:, b, head // shared],
                forbidden,
                use_reentrant=False,
            )
            for b in range(batch)
            for head in range(heads)
        ]
        output = torch.stack(context, 1).unflatten(1, (batch, heads)).flatten(2)
        tape.outputs(operator, {"output": output})
        return output


def _one_head(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, forbidden: torch.Tensor
) -> torch.Tensor:
    return formulas.attend(formulas.scores(query, key), value, forbidden)
