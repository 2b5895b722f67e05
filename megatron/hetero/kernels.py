"""The fused kernels of a run, chosen by its flags and its device, and installed in megatron-core.

megatron-core leaves these to apex or TransformerEngine. They need torch alone and run wherever it
does, so both vendors of a run can use the same ones. docs/benchmarks/kernels.md says for each what
it gains and what was tried beside it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.hetero import core_private


def has_liger_swiglu() -> bool:
    """Whether liger-kernel can be imported and has the kernel, as it does from 0.8.2 on."""
    try:
        from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction  # noqa: F401
    except ImportError:
        return False
    return True


class LigerSwiGLU:
    """Replacement for megatron-core's SwiGLUFunction (Shazeer, arXiv 2002.05202), by liger-kernel.

    torch.compile makes two passes of its gradient, whose halves share what they read. The Triton
    kernel of liger-kernel makes one, on both vendors.
    """

    @staticmethod
    def apply(
        gate_up: torch.Tensor, fp8_input_store: bool = False, cpu_offload_input: bool = False
    ) -> torch.Tensor:
        """silu(gate) * up, (tokens, ffn), of `gate_up` (tokens, 2 * ffn)."""
        if fp8_input_store or cpu_offload_input:
            raise NotImplementedError("the one-pass SwiGLU keeps its input as it is, on the GPU")
        from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

        result: torch.Tensor = LigerFusedGateUpSiLUMulFunction.apply(gate_up)
        return result


class _Lookup(torch.autograd.Function):
    """Rows of `weight` (rows, hidden) at `ids`, any shape; adds to `weight.main_grad`."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (ids,) = ctx.saved_tensors
        weight = ctx.weight
        grad_th = grads[0].reshape(-1, weight.shape[1])
        # Unlike index_add_ it adds in an order of its own, the same each time.
        weight.main_grad.index_put_(
            (ids.reshape(-1),), grad_th.to(weight.main_grad.dtype), accumulate=True
        )
        weight.grad_added_to_main_grad = True
        # megatron-core's hook wants a gradient to be there, and adds it where the weight is also
        # the output layer's.
        make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
        return make(weight, requires_grad=False), None


class RowwiseEmbedding(VocabParallelEmbedding):
    """megatron-core's VocabParallelEmbedding with a gradient that is added row by row.

    torch makes a gradient as large as the embedding for every micro-batch, which is then added to
    the float32 buffer: for LLaMA-3's 128,256 rows, of which one sequence touches 4,096 at most,
    three passes over gigabytes. Here only those rows are touched.

    Takes ids (b, s); returns (b, s, hidden), or (s, b, hidden) split over the tensor-parallel group
    where megatron-core asks for it.
    """

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        main_grad = getattr(self.weight, "main_grad", None)
        # In half precision every occurrence of a token would be rounded by itself, and a few
        # hundred of them would no longer add up.
        if main_grad is None or main_grad.dtype != torch.float32:
            result: torch.Tensor = super().forward(input_)
            return result
        embedded = self._rows_held_here(input_)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(
                embedded.transpose(0, 1).contiguous(), group=self.tp_group
            )
        return reduce_from_tensor_model_parallel_region(embedded, group=self.tp_group)

    def _rows_held_here(self, input_: torch.Tensor) -> torch.Tensor:
        """Rows (b, s, hidden) of this rank's part of the vocabulary, zeros for the others'."""
        if self.tp_group.size() == 1:
            looked_up: torch.Tensor = _Lookup.apply(self.weight, input_)
            return looked_up
        local = input_ - self.vocab_start_index
        rows = self.weight.shape[0]
        is_elsewhere = (local < 0) | (local >= rows)
        # A row held elsewhere reads any row here, and not all the same one: their gradients, all
        # zero, would be added to it one after another.
        spread = torch.arange(local.numel(), device=local.device).remainder(rows)
        ids = torch.where(is_elsewhere, spread.view_as(local), local)
        embedded: torch.Tensor = _Lookup.apply(self.weight, ids)
        return embedded.masked_fill(is_elsewhere.unsqueeze(-1), 0)


def use_rowwise_gradient(embedding: VocabParallelEmbedding) -> None:
    """Switch an embedding that megatron-core built to the row-wise gradient, in place."""
    embedding.__class__ = RowwiseEmbedding


def accumulate_wgrad(
    main_grad: torch.Tensor, *, grad_output_tn: torch.Tensor, input_tk: torch.Tensor
) -> None:
    """main_grad (n, k) += grad_output (tokens, n) transposed times input (tokens, k), in place."""
    grad_output_nt = grad_output_tn.t()
    if main_grad.dtype == input_tk.dtype:
        main_grad.addmm_(grad_output_nt, input_tk)
        return
    torch.addmm(main_grad, grad_output_nt, input_tk, out_dtype=main_grad.dtype, out=main_grad)


GROUPED_ALIGNMENT_BYTES = 16
"""Of the rows of what torch's grouped product takes."""


def can_group(input_tk: torch.Tensor, width: int) -> bool:
    """Whether torch's grouped product takes `input_tk` (tokens, k) and gives rows of `width`.

    Where it has no kernel for a device it computes one group after the other by itself.
    """
    if not hasattr(F, "grouped_mm") or not len(input_tk):
        return False
    sizes = (input_tk.shape[1], width)
    if any(size * input_tk.element_size() % GROUPED_ALIGNMENT_BYTES for size in sizes):
        return False
    return input_tk.dtype in (torch.bfloat16, torch.float16, torch.float32)


def grouped_product(
    input_tk: torch.Tensor, weight_ekn: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """(tokens, n): the rows of each group, which are consecutive, times that group's matrix.

    `ends` (groups,), int32: the row after the last one of each group; it stays on the device.
    """
    if not can_group(input_tk, weight_ekn.shape[2]):
        return looped_product(input_tk, weight_ekn, ends)
    product: torch.Tensor = F.grouped_mm(input_tk, weight_ekn, offs=ends)
    return product


def looped_product(
    input_tk: torch.Tensor, weight_ekn: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """The same by a product for each group; the host waits for `ends`."""
    parts = input_tk.tensor_split(ends[:-1].tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weight_ekn, strict=True)])


def grouped_wgrad(
    input_tk: torch.Tensor, grad_output_tn: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """(groups, n, k): of each group, its output gradients transposed times its inputs."""
    if not can_group(input_tk, grad_output_tn.shape[1]):
        return looped_wgrad(input_tk, grad_output_tn, ends)
    product: torch.Tensor = F.grouped_mm(grad_output_tn.t(), input_tk, offs=ends)
    return product


def looped_wgrad(
    input_tk: torch.Tensor, grad_output_tn: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """The same by a product for each group; the host waits for `ends`."""
    splits = ends[:-1].tolist()
    pairs = zip(grad_output_tn.tensor_split(splits), input_tk.tensor_split(splits), strict=True)
    return torch.stack([grad.t() @ rows for grad, rows in pairs])


def can_add_grouped(input_tk: torch.Tensor, main_grad: torch.Tensor) -> bool:
    """Whether `add_grouped_wgrad` takes them: it runs on GPUs."""
    is_half = input_tk.dtype in (torch.bfloat16, torch.float16)
    return input_tk.is_cuda and is_half and main_grad.dtype == torch.float32


def can_accumulate_wgrad(
    device: torch.device, *, input_dtype: torch.dtype, grad_dtype: torch.dtype
) -> bool:
    """Whether this build of torch supports such a GEMM for these dtypes, and computes it right."""
    if device.type != "cuda":
        return input_dtype == grad_dtype
    counted = torch.arange(32 * 16, device=device).remainder(7).to(input_dtype)
    grad_output_tn, input_tk = counted.view(32, 16), counted.flip(0).view(32, 16)
    main_grad = torch.ones(16, 16, device=device, dtype=grad_dtype)
    expected = grad_output_tn.float().t() @ input_tk.float() + 1
    try:
        accumulate_wgrad(main_grad, grad_output_tn=grad_output_tn, input_tk=input_tk)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return bool(torch.allclose(main_grad.float(), expected, rtol=1e-2))


class AccumulatingWgrad:
    """Replacement for apex's fused_weight_gradient_mlp_cuda: GEMMs that accumulate in `main_grad`.

    Otherwise every micro-batch writes each weight gradient in half precision and reads it again to
    add it to the float32 buffer: a twelfth of LLaMA-8B's step on an H200. Accumulating in the GEMM
    also avoids rounding to half precision first.
    """

    @staticmethod
    def wgrad_gemm_accum_fp32(
        input_tk: torch.Tensor, grad_output_tn: torch.Tensor, main_grad: torch.Tensor
    ) -> None:
        accumulate_wgrad(main_grad, grad_output_tn=grad_output_tn, input_tk=input_tk)

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32

    @staticmethod
    def add_product(add: Callable[[torch.Tensor], None], main_grad: torch.Tensor) -> None:
        """Let `add` add to the buffer."""
        add(main_grad)

    @staticmethod
    def grouped(
        input_tk: torch.Tensor, grad_output_tn: torch.Tensor, ends: torch.Tensor, weight: Any
    ) -> torch.Tensor:
        """Add `grouped_wgrad` to the buffer of `weight`.

        Returns what megatron-core's hook wants as a gradient, and does not read.
        """
        if can_add_grouped(input_tk, weight.main_grad):
            from megatron.hetero.grouped_wgrad import add_grouped_wgrad

            add_grouped_wgrad(
                weight.main_grad, grad_output_tn=grad_output_tn, input_tk=input_tk, ends=ends
            )
            return torch.empty_like(weight)
        gradient = grouped_wgrad(input_tk, grad_output_tn, ends)
        weight.main_grad.add_(gradient)
        return gradient


class DelayedWgrad:
    """The same, deferred until `compute`, after the stage's input gradient has been sent.

    Until then the input and output gradient of every weight stay in memory, of one micro-batch.

    Args:
        copies_inputs: clone inputs; required with sequence parallelism, which gathers them into a
            buffer that the next layer reuses.
    """

    def __init__(self, *, copies_inputs: bool) -> None:
        self._copies_inputs = copies_inputs
        self._waiting: list[Callable[[], Any]] = []

    def wgrad_gemm_accum_fp32(
        self, input_tk: torch.Tensor, grad_output_tn: torch.Tensor, main_grad: torch.Tensor
    ) -> None:
        kept = input_tk.clone() if self._copies_inputs else input_tk
        self._waiting.append(
            partial(accumulate_wgrad, main_grad, grad_output_tn=grad_output_tn, input_tk=kept)
        )

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32

    def add_product(self, add: Callable[[torch.Tensor], None], main_grad: torch.Tensor) -> None:
        self._waiting.append(partial(add, main_grad))

    def grouped(
        self, input_tk: torch.Tensor, grad_output_tn: torch.Tensor, ends: torch.Tensor, weight: Any
    ) -> torch.Tensor:
        wait = partial(AccumulatingWgrad.grouped, input_tk, grad_output_tn, ends, weight)
        self._waiting.append(wait)
        return torch.empty_like(weight)

    @torch.no_grad()
    def compute(self) -> None:
        """Compute all deferred gradients, in backward order, freeing each one's inputs."""
        waiting, self._waiting = self._waiting[::-1], []
        while waiting:
            waiting.pop()()


@dataclass(frozen=True)
class Kernels:
    """Which kernels a run uses."""

    weight_gradient: bool = False
    """GEMMs, and the embedding's backward, accumulate into `main_grad` directly."""
    rotary: bool = False
    split_rotary: bool = False
    """RoPE reads queries and keys straight from the fused QKV projection."""
    swiglu: bool = False
    cross_entropy: bool = False

    def names(self) -> str:
        """The enabled kernels, for the log."""
        used = [name.replace("_", " ") for name, is_used in vars(self).items() if is_used]
        return ", ".join(used) or "none"


def select_kernels(args: argparse.Namespace, device: torch.device) -> Kernels:
    """The kernels that the flags ask for; none on CPU, but for --delay-wgrad-compute."""
    if device.type != "cuda":
        return Kernels(weight_gradient=args.delay_wgrad_compute)
    is_local = args.transformer_impl == "local"
    rotary = is_local and args.apply_rope_fusion and not args.rotary_interleaved
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    return Kernels(
        weight_gradient=args.gradient_accumulation_fusion,
        rotary=rotary,
        # megatron-core calls it only if a rank holds whole query groups and if nothing happens to
        # queries and keys between projection and rotation.
        split_rotary=rotary and not args.qk_layernorm and groups >= args.tensor_model_parallel_size,
        swiglu=is_local
        and args.swiglu
        and args.bias_swiglu_fusion
        and not args.add_bias_linear
        and has_liger_swiglu(),
        cross_entropy=is_local
        and args.cross_entropy_loss_fusion
        and args.tensor_model_parallel_size == 1,
    )


def install_kernels(
    kernels: Kernels,
    config: TransformerConfig,
    *,
    device: torch.device,
    grad_dtype: torch.dtype,
    wgrad: object = AccumulatingWgrad,
) -> Kernels:
    """Install the kernels in megatron-core; returns those that this build of torch supports.

    `grad_dtype` is the dtype of the gradient buffers, `wgrad` what accumulates into them. All ranks
    of a vendor must run the same build of torch, so that they come to the same result.
    """
    if kernels.weight_gradient and not can_accumulate_wgrad(
        device, input_dtype=config.params_dtype, grad_dtype=grad_dtype
    ):
        kernels = replace(kernels, weight_gradient=False)
    if kernels.weight_gradient:
        core_private.install_weight_gradient(wgrad)
        config.gradient_accumulation_fusion = True
    if kernels.rotary:
        from megatron.hetero.compiled_kernels import Rotary

        rotary = Rotary()
        core_private.install_rotary(rotary.rotate, rotary.split_and_rotate)
        config.apply_rope_fusion = True
        config.fused_single_qkv_rope = kernels.split_rotary
    if kernels.swiglu:
        core_private.install_swiglu(LigerSwiGLU)
    return kernels


def _fused_loss(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """megatron-core's loss of tokens by the fused kernel, for a vocabulary that is not split."""
    from megatron.hetero.compiled_kernels import fused_cross_entropy

    return fused_cross_entropy(logits, labels)


def patch_chunk(chunk: GPTModel, kernels: Kernels) -> None:
    """Replace parts of a built chunk for which megatron-core has no hook."""
    if kernels.cross_entropy:
        chunk.compute_language_model_loss = _fused_loss
    if kernels.weight_gradient and (chunk.pre_process or chunk.mtp_process):
        use_rowwise_gradient(chunk.embedding.word_embeddings)
