"""Which layers are mixtures of experts, as `--moe-layer-freq` says it."""

from __future__ import annotations

import ast

_LONGEST = 100_000
"""A longer list has a mistyped number of repetitions."""


def layer_pattern(text: str) -> int | list[int]:
    """A period, such as '2', or a list of 0 and 1, such as '[0]*1+[1]*26'. Raises ValueError."""
    try:
        value = _evaluated(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(text) from error
    if isinstance(value, int) and value > 0:
        return value
    if isinstance(value, list) and value and set(value) <= {0, 1}:
        return value
    raise ValueError(text)


def _evaluated(node: ast.expr) -> int | list[int]:
    """The value of numbers, lists of them, their sums and repetitions. Raises ValueError."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        items = [_evaluated(item) for item in node.elts]
        return [item for item in items if isinstance(item, int)]
    if isinstance(node, ast.BinOp):
        left, right = _evaluated(node.left), _evaluated(node.right)
        if isinstance(left, list) and isinstance(right, list) and isinstance(node.op, ast.Add):
            return left + right
        if isinstance(left, int):
            left, right = right, left
        if isinstance(left, list) and isinstance(right, int) and isinstance(node.op, ast.Mult):
            if len(left) * right > _LONGEST:
                raise ValueError
            return left * right
    raise ValueError


def has_experts(pattern: int | list[int], layer: int) -> bool:
    """Whether a layer, counted from 0 over the model, has experts where there are any."""
    return bool(layer % pattern == 0 if isinstance(pattern, int) else pattern[layer])
