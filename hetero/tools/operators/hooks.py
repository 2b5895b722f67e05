"""Reports every operator of a model's real modules to a tape, by hooks that change nothing.

Modules begin and end at hooks. What lies between two modules is an operator too: splitting heads
and rotary embedding between the QKV projection and the attention core, the activation between the
two projections of the MLP. Residual additions are functions that a layer holds, and are wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from hetero.tools.operators import operator_list
from hetero.tools.operators.tape import Tape


class _Hooks:
    """Reports the operators of one model to one tape, for as long as `undo` is open."""

    def __init__(self, tape: Tape, undo: ExitStack) -> None:
        self._tape = tape
        self._undo = undo

    def before(
        self, module: torch.nn.Module, change: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    ) -> None:
        """Let `change` see and replace the positional arguments of a module."""
        handle = module.register_forward_pre_hook(lambda _, args: change(args))
        self._undo.callback(handle.remove)

    def after(self, module: torch.nn.Module, change: Callable[[dict[str, Any], Any], Any]) -> None:
        """Let `change` see the keyword arguments and replace the result of a module."""
        handle = module.register_forward_hook(
            lambda _, __, kwargs, result: change(kwargs, result), with_kwargs=True
        )
        self._undo.callback(handle.remove)

    def embedding(self, module: torch.nn.Module) -> None:
        def record(_: dict[str, Any], output: torch.Tensor) -> None:
            parameters = dict(module.named_parameters())
            self._tape.outputs(operator_list.EMBEDDING, {"output": output}, parameters)

        self.after(module, record)

    def angles(self, module: torch.nn.Module) -> None:
        def record(_: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
            self._tape.outputs(operator_list.ANGLES, {"output": output})
            return self._tape.angles(output)

        self.after(module, record)

    def norm(
        self,
        module: torch.nn.Module,
        operator: str,
        *,
        arrived: Callable[[torch.Tensor], None] = lambda _: None,
        leave: Callable[[torch.Tensor], torch.Tensor] = lambda output: output,
    ) -> None:
        """`arrived` sees the input as it came, `leave` replaces the output that goes on."""

        def begin(args: tuple[Any, ...]) -> tuple[Any, ...]:
            arrived(args[0])
            return (self._tape.inputs(operator, hidden=args[0])["hidden"], *args[1:])

        def end(_: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
            self._tape.outputs(operator, {"output": output}, dict(module.named_parameters()))
            return leave(output)

        self.before(module, begin)
        self.after(module, end)

    def linear(
        self,
        module: torch.nn.Module,
        operator: str,
        *,
        arrived: Callable[[torch.Tensor], None] = lambda _: None,
        leave: Callable[[torch.Tensor], torch.Tensor] = lambda output: output,
        adds_bias: bool = False,
    ) -> None:
        """A projection; it adds its bias itself, or leaves that to the operator behind it."""

        def begin(args: tuple[Any, ...]) -> tuple[Any, ...]:
            arrived(args[0])
            return (self._tape.inputs(operator, hidden=args[0])["hidden"], *args[1:])

        def end(kwargs: dict[str, Any], result: tuple[torch.Tensor, Any]) -> tuple[Any, Any]:
            output, bias = result
            weight = kwargs.get("weight")
            parameters: dict[str, Any] = {"weight": module.weight if weight is None else weight}
            if adds_bias and module.bias is not None:
                parameters["bias"] = module.bias
            self._tape.outputs(operator, {"output": output}, parameters)
            return leave(output), bias

        self.before(module, begin)
        self.after(module, end)

    def attention(self, attention: Any, name: Callable[[str], str]) -> None:
        """Projection, heads and rotary embedding, core, and projection back."""
        rotary, core = name("rotary"), name("core_attention")
        split: dict[str, torch.Tensor] = {}
        self.linear(
            attention.linear_qkv,
            name("linear_qkv"),
            adds_bias=True,
            leave=lambda output: self._tape.inputs(rotary, qkv=output)["qkv"],
        )
        for norm, head in ((attention.q_layernorm, "query"), (attention.k_layernorm, "key")):
            if attention.config.qk_layernorm:
                self.norm(
                    norm,
                    name(f"{head[0]}_layernorm"),
                    arrived=lambda x, head=head: split.update({f"{head} before norm": x}),  # type: ignore[misc]
                    leave=lambda x, head=head: self._tape.inputs(rotary, **{head: x})[head],  # type: ignore[misc]
                )

        def begin(args: tuple[Any, ...]) -> tuple[Any, ...]:
            heads = dict(zip(("query", "key", "value"), args[:3], strict=True))
            self._tape.outputs(rotary, {**heads, **split})
            split.clear()
            given = self._tape.inputs(core, **heads)
            return (given["query"], given["key"], given["value"], *args[3:])

        def end(_: dict[str, Any], output: torch.Tensor) -> None:
            self._tape.outputs(core, {"output": output})

        self.before(attention.core_attention, begin)
        self.after(attention.core_attention, end)
        self.linear(attention.linear_proj, name("linear_proj"))

    def residual(self, layer: Any, attribute: str, operator: str) -> None:
        original = getattr(layer, attribute)

        def build(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
            add = original(training, fused)

            def call(
                branch: tuple[torch.Tensor, torch.Tensor | None],
                residual: torch.Tensor,
                dropout: float,
            ) -> torch.Tensor:
                given = self._tape.inputs(operator, branch=branch[0], residual=residual)
                output: torch.Tensor = add((given["branch"], branch[1]), given["residual"], dropout)
                bias = {} if branch[1] is None else {"bias": branch[1]}
                self._tape.outputs(operator, {"output": output}, bias)
                return output

            return call

        self._undo.enter_context(mock.patch.object(layer, attribute, build))

    def mlp(self, mlp: Any, name: Callable[[str], str]) -> None:
        activation = name("activation")

        def activated(output: torch.Tensor) -> None:
            bias = {} if mlp.linear_fc1.bias is None else {"bias": mlp.linear_fc1.bias}
            self._tape.outputs(activation, {"output": output}, bias)

        self.linear(
            mlp.linear_fc1,
            name("linear_fc1"),
            leave=lambda output: self._tape.inputs(activation, hidden=output)["hidden"],
        )
        self.linear(mlp.linear_fc2, name("linear_fc2"), arrived=activated)


@contextmanager
def operator_hooks(model: GPTModel, tape: Tape) -> Iterator[None]:
    """Report every operator that `model` computes in the body to `tape`.

    The loss that the model returns is the output of `operator_list.LOSS`, which the caller reports.
    """
    with ExitStack() as undo:
        hooks = _Hooks(tape, undo)
        hooks.embedding(model.embedding)
        if model.position_embedding_type == "rope":
            hooks.angles(model.rotary_pos_emb)
        for index, layer in enumerate(model.decoder.layers):

            def name(operator: str, index: int = index) -> str:
                return operator_list.layer_operator(index, operator)

            hooks.norm(layer.input_layernorm, name("input_layernorm"))
            hooks.attention(layer.self_attention, name)
            hooks.residual(layer, "self_attn_bda", name("attention_residual"))
            hooks.norm(layer.pre_mlp_layernorm, name("pre_mlp_layernorm"))
            hooks.mlp(layer.mlp, name)
            hooks.residual(layer, "mlp_bda", name("mlp_residual"))
        hooks.norm(model.decoder.final_layernorm, operator_list.FINAL_NORM)
        hooks.linear(
            model.output_layer,
            operator_list.OUTPUT_LAYER,
            leave=lambda logits: tape.inputs(operator_list.LOSS, logits=logits)["logits"],
        )
        yield
