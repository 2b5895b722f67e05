"""Some rows of what operators of a run are given and compute, copied while they run."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from typing import Any

import torch

from hetero.observe.operators.case import Case
from hetero.observe.operators.formulas import activation_name
from hetero.observe.operators.operator_list import Operator
from hetero.observe.operators.sample import stride_for
from hetero.observe.operators.tape import Tensors

_ROWS, _ELEMENTS = 64, 1 << 19
"""Rows of a sample: as many as these elements have, and no fewer than these rows."""
_HEADS = 8


class RowsTape:
    """Copies some rows of what operators are given and compute. Never raises; see `errors`.

    Args:
        args: the run's flags.
        operators: those that may be reported, by name.
        number: of the sample. Other rows and heads are taken each time.
        left_out: kinds and names of operators that are not to be compared.
        tensor: (rank, size) in the tensor-parallel group.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        operators: Mapping[str, Operator],
        *,
        number: int,
        left_out: Mapping[str, str],
        tensor: tuple[int, int],
    ) -> None:
        self._args, self._operators, self._number = args, operators, number
        self._left_out, self._tensor = left_out, tensor
        self._rows: dict[str, tuple[torch.Tensor, ...]] = {}
        self._given: dict[str, dict[str, torch.Tensor]] = {}
        self._heads: tuple[int, list[int]] = (0, [])
        self._angles: torch.Tensor | None = None
        self.cases: list[Case] = []
        self.errors: dict[str, Exception] = {}
        """Of operators that could not be recorded; the others are."""

    def inputs(self, operator: str, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        if operator not in self.errors and not self._is_left_out(operator):
            try:
                with torch.no_grad():
                    self._keep_inputs(operator, tensors)
            except Exception as error:  # whatever it is, training goes on
                self.fail(operator, error)
        return tensors

    def angles(self, tensor: torch.Tensor) -> torch.Tensor:
        self._angles = tensor
        return tensor

    def outputs(self, operator: str, outputs: Tensors, parameters: Tensors | None = None) -> None:
        if operator in self._given:
            try:
                with torch.no_grad():
                    self._keep_outputs(operator, outputs, dict(parameters or {}))
            except Exception as error:  # as above
                self.fail(operator, error)

    def fail(self, operator: str, error: Exception) -> None:
        """This operator cannot be recorded: forget what was kept of it."""
        self.errors.setdefault(operator, error)
        self._given.pop(operator, None)
        self._rows.pop(operator, None)

    def _is_left_out(self, operator: str) -> bool:
        if operator not in self._operators:
            return True
        name, kind = operator.rpartition(".")[2], self._operators[operator].kind
        return name in self._left_out or kind in self._left_out

    def _keep_inputs(self, operator: str, tensors: Tensors) -> None:
        given = self._given.setdefault(operator, {})
        if self._operators[operator].kind == "attention":
            given |= self._attention_inputs(operator, tensors)
            return
        for name, tensor in tensors.items():
            if operator not in self._rows:
                self._rows[operator] = self._choose(tensor)
            given[name] = tensor[self._rows[operator]]

    def _choose(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Indices of rows, spread over all dimensions but the last."""
        lead = tensor.shape[:-1]
        rows = self._spread(math.prod(lead), width=tensor.shape[-1], device=tensor.device)
        return tuple(torch.unravel_index(rows, lead))

    def _spread(self, rows: int, *, width: int, device: torch.device) -> torch.Tensor:
        count = max(_ROWS, _ELEMENTS // max(1, width))
        if rows <= count:
            return torch.arange(rows, device=device)
        stride = stride_for(rows, count)
        return torch.arange(self._number % stride, rows, stride, device=device)

    def _attention_inputs(self, operator: str, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Some queries of some heads of one sequence, and every key and value of theirs."""
        query, key, value = (tensors[name] for name in ("query", "key", "value"))
        sequence, batch, heads, _ = query.shape
        count = min(heads, _HEADS)
        chosen = sorted((self._number * count + each) % heads for each in range(count))
        queries = self._spread(sequence, width=sequence, device=query.device)
        one = self._number % batch
        self._rows[operator], self._heads = (queries,), (one, chosen)
        shared = [head // (heads // key.shape[2]) for head in chosen]
        return {
            "query": query[queries, one][:, chosen],
            "key": key[:, one][:, shared],
            "value": value[:, one][:, shared],
            "positions": queries,
        }

    def _keep_outputs(
        self, operator: str, outputs: Tensors, parameters: dict[str, torch.Tensor]
    ) -> None:
        about, given, rows = self._operators[operator], self._given.pop(operator), self._rows
        index = rows.pop(operator)
        if about.kind == "attention":
            one, chosen = self._heads
            heads = self._args.num_attention_heads // self._tensor[1]
            context = outputs["output"][index[0], one].unflatten(-1, (heads, -1))
            kept = {"output": context[:, chosen]}
        else:
            if about.kind == "linear":
                index = self._after_gathering(index, outputs["output"], operator)
            kept = {name: tensor[index] for name, tensor in outputs.items()}
        if about.kind == "rotary" and self._angles is not None:
            given["angles"] = self._angles[index[0], 0, 0]
        if about.kind == "loss":
            parameters["labels"] = parameters["labels"][index]
        self.cases.append(
            Case(
                operator=operator,
                kind=about.kind,
                rounding=about.rounding,
                settings=self._settings(about.kind),
                inputs=given,
                parameters={name: tensor.detach() for name, tensor in parameters.items()},
                outputs=kept,
            )
        )

    def _after_gathering(
        self, index: tuple[torch.Tensor, ...], output: torch.Tensor, operator: str
    ) -> tuple[torch.Tensor, ...]:
        """Where the rows of this rank are, if the product is of the whole group's sequence."""
        rank, size = self._tensor
        is_gathered = self._args.sequence_parallel and size > 1
        if not is_gathered or operator.endswith(("linear_proj", "linear_fc2")):
            return index
        return (index[0] + rank * (output.shape[0] // size), *index[1:])

    def _settings(self, kind: str) -> dict[str, Any]:
        args = self._args
        if kind == "norm":
            return {
                "epsilon": args.layernorm_epsilon,
                "is_centred": args.normalization == "LayerNorm",
                "is_zero_centred": bool(args.layernorm_zero_centered_gamma),
            }
        if kind == "activation":
            return {"activation": activation_name(args)}
        if kind == "rotary":
            groups = args.num_attention_heads
            if args.group_query_attention:
                groups = args.num_query_groups
            return {
                "groups": groups // self._tensor[1],
                "width": args.kv_channels,
                "is_interleaved": bool(args.rotary_interleaved),
            }
        return {"scale": args.softmax_scale} if kind == "attention" else {}
