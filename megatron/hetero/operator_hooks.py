"""Reports every operator of a model's real modules to a tape, by hooks that change nothing.

Modules begin and end at hooks. What lies between two modules is an operator too: splitting heads
and rotary embedding between the QKV projection and the attention core, the activation between the
two projections of the MLP. Residual additions are functions that a layer holds, and are wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.identity_op import IdentityOp

from hetero.observe.operators import operator_list
from hetero.observe.operators.tape import Tape


def _ignore(_: torch.Tensor) -> None:
    pass


def _keep(output: torch.Tensor) -> torch.Tensor:
    return output


class _Hooks:
    """Reports the operators of one model to one tape, for as long as `undo` is open.

    With `local`, a linear layer is what this rank computes of it, without what is exchanged with
    others of its tensor-parallel group before or after.
    """

    def __init__(self, tape: Tape, undo: ExitStack, *, local: bool = False) -> None:
        self._tape = tape
        self._undo = undo
        self._local = local

    def before(
        self, module: torch.nn.Module, change: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    ) -> None:
        """Let `change` see and replace the positional arguments of a module."""
        handle = module.register_forward_pre_hook(lambda _, args: change(args))
        self._undo.callback(handle.remove)

    def after(self, module: torch.nn.Module, change: Callable[[dict[str, Any], Any], Any]) -> None:
        """Let `change` see the keyword arguments and replace the result of a module."""
        # First, as a factor that a model has for the result is a hook too.
        handle = module.register_forward_hook(
            lambda _, __, kwargs, result: change(kwargs, result), with_kwargs=True, prepend=True
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
        arrived: Callable[[torch.Tensor], None] = _ignore,
        leave: Callable[[torch.Tensor], torch.Tensor] = _keep,
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
        arrived: Callable[[torch.Tensor], None] = _ignore,
        leave: Callable[[torch.Tensor], torch.Tensor] = _keep,
        adds_bias: bool = False,
    ) -> None:
        """A projection; it adds its bias itself, or leaves that to the operator behind it."""

        def seen(args: tuple[Any, ...]) -> tuple[Any, ...]:
            arrived(args[0])
            return args

        if self._local:
            self._own_product(module, operator)
            if arrived is not _ignore:
                self.before(module, seen)
            if leave is not _keep:
                self.after(module, lambda _, result: (leave(result[0]), result[1]))
            return

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

    def _own_product(self, module: Any, operator: str) -> None:
        """The GEMM of a projection, between what its group exchanges before and after."""
        compute = module._forward_impl

        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            if "input" in kwargs:
                self._tape.inputs(operator, hidden=kwargs["input"])
            output: torch.Tensor = compute(*args, **kwargs)
            if "input" in kwargs:
                bias = kwargs.get("bias")
                used = {"weight": kwargs["weight"]} | ({} if bias is None else {"bias": bias})
                self._tape.outputs(operator, {"output": output}, used)
            return output

        self._undo.enter_context(mock.patch.object(module, "_forward_impl", call))

    def words(self, module: Any, failed: Callable[[str, Exception], None]) -> None:
        """The rows of the embedding that this rank holds; what others hold counts as right."""
        seen: list[torch.Tensor] = []

        def begin(args: tuple[Any, ...]) -> tuple[Any, ...]:
            seen[:] = [args[0]]
            return args

        @torch.no_grad()
        def report(output: torch.Tensor) -> None:
            tokens = seen.pop()
            if module.reduce_scatter_embeddings:
                tokens = tokens.t().chunk(module.tp_group.size())[module.tp_group.rank()]
            own = tokens - module.vocab_start_index
            is_here = (own >= 0) & (own < module.weight.shape[0])
            rows = module.weight[own.where(is_here, 0)]
            self._tape.inputs(operator_list.EMBEDDING, rows=rows)
            known = torch.where(is_here.unsqueeze(-1), output, rows)
            self._tape.outputs(operator_list.EMBEDDING, {"output": known})

        def end(_: dict[str, Any], output: torch.Tensor) -> None:
            try:
                report(output)
            except Exception as error:  # such as a want of memory: training goes on
                failed(operator_list.EMBEDDING, error)

        self.before(module, begin)
        self.after(module, end)

    def loss(self, model: GPTModel) -> None:
        compute = model.compute_language_model_loss

        def call(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            self._tape.inputs(operator_list.LOSS, logits=logits)
            loss: torch.Tensor = compute(labels, logits)
            # (batch, sequence), and the logits are (sequence, batch, vocabulary).
            self._tape.outputs(operator_list.LOSS, {"loss": loss.t()}, {"labels": labels.t()})
            return loss

        self._undo.enter_context(mock.patch.object(model, "compute_language_model_loss", call))

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

    def layer(self, layer: Any, name: Callable[[str], str]) -> None:
        """Every operator of a layer but norms that are none, and additions that are modules."""
        if not isinstance(layer.input_layernorm, IdentityOp):
            self.norm(layer.input_layernorm, name("input_layernorm"))
        self.attention(layer.self_attention, name)
        if not isinstance(layer.self_attn_bda, torch.nn.Module):
            self.residual(layer, "self_attn_bda", name("attention_residual"))
        if not isinstance(layer.pre_mlp_layernorm, IdentityOp):
            self.norm(layer.pre_mlp_layernorm, name("pre_mlp_layernorm"))
        self.mlp(layer.mlp, name)
        if not isinstance(layer.mlp_bda, torch.nn.Module):
            self.residual(layer, "mlp_bda", name("mlp_residual"))


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
            hooks.layer(layer, partial(operator_list.layer_operator, index))
        hooks.norm(model.decoder.final_layernorm, operator_list.FINAL_NORM)
        hooks.linear(
            model.output_layer,
            operator_list.OUTPUT_LAYER,
            leave=lambda logits: tape.inputs(operator_list.LOSS, logits=logits)["logits"],
        )
        yield


@contextmanager
def chunk_hooks(
    chunk: GPTModel,
    tape: Tape,
    *,
    layer: int | None,
    name: Callable[[str], str],
    failed: Callable[[str, Exception], None],
) -> Iterator[None]:
    """Report one layer of a model chunk, and the ends of the model that it has, to `tape`.

    What is reported is what this rank computes by itself, whatever its tensor-parallel group is.

    Args:
        chunk: some layers of a model, with its beginning or its end or neither.
        tape: must return the tensors that it gets.
        layer: its index in the chunk; None: only the ends.
        name: the name of an operator of that layer.
        failed: told of an operator that cannot be reported, and why.
    """
    with ExitStack() as undo:
        hooks = _Hooks(tape, undo, local=True)
        if chunk.pre_process:
            hooks.words(chunk.embedding.word_embeddings, failed)
        if layer is not None:
            if chunk.position_embedding_type == "rope":
                hooks.angles(chunk.rotary_pos_emb)
            hooks.layer(chunk.decoder.layers[layer], name)
        if chunk.post_process:
            if chunk.decoder.final_layernorm is not None:
                hooks.norm(chunk.decoder.final_layernorm, operator_list.FINAL_NORM)
            hooks.linear(chunk.output_layer, operator_list.OUTPUT_LAYER)
            hooks.loss(chunk)
        yield
