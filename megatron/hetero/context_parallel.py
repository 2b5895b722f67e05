"""Attention over sequences that the ranks of a context-parallel group share.

Each rank holds two chunks of every sequence (`context_chunks`), and its queries need the keys and
values of other ranks. --cp-comm-type chooses how they meet; the sums are the same:

| type | exchanges | needs |
|---|---|---|
| `a2a` | heads for rows, before and after: each rank has whole sequences of some heads (DeepSpeed Ulysses, arXiv:2309.14509) | heads and query groups that the size divides |
| `all_gather` | keys and values, gathered (Llama 3, arXiv:2407.21783, section 3.3.2) | memory for all keys and values of a layer |
| `p2p` | keys and values, from rank to rank while the kernel runs (ring attention, arXiv:2310.01889) | |

`all_gather` and `p2p` compute blocks of queries and keys with the kernel that torch would choose for
whole sequences, and merge them by their log-sum-exp. A mask, dropout, or an --attention-backend
without such kernels takes the same keys gathered and one call of SDPA.
"""  # noqa: E501

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from hetero.plan.plan import context_chunks
from megatron.hetero.multi_token_prediction import LOSS_MASK, WHOLE_TOKENS

A2A, ALL_GATHER, P2P = "a2a", "all_gather", "p2p"
COMM_TYPES = (P2P, ALL_GATHER, A2A)

Attend = Callable[..., torch.Tensor]
"""(query, key, value, allowed) -> output, as `SdpaAttention` computes it on one rank."""


def slice_batch(batch: dict[str, torch.Tensor], *, size: int, rank: int) -> dict[str, torch.Tensor]:
    """A micro-batch with the rows of one context-parallel rank.

    The attention mask stays whole: kernels choose its rows. `whole_tokens` is added, the number of
    tokens of the whole sequences that count for the loss, and `mtp_whole_tokens`, those of each MTP
    layer.
    """
    if size == 1:
        return batch
    sliced = {
        name: tensor if name == "attention_mask" else _own_chunks(tensor, 1, size=size, rank=rank)
        for name, tensor in batch.items()
    }
    counts = {"whole_tokens": "loss_mask", WHOLE_TOKENS: LOSS_MASK}
    for count, mask in counts.items():
        if mask in batch:
            sliced[count] = batch[mask].sum(dim=(0, 1)).to(torch.int)
    return sliced


def _own_chunks(whole: torch.Tensor, axis: int, *, size: int, rank: int) -> torch.Tensor:
    chunks = context_chunks(size, rank, whole.shape[axis])
    return torch.cat([whole.narrow(axis, rows.start, len(rows)) for rows in chunks], axis)


def _in_order(held: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
    """Whole sequences from what each rank of the group holds, by rank."""
    pairs = [each.chunk(2, axis) for each in held]
    return torch.cat([low for low, _ in pairs] + [high for _, high in reversed(pairs)], axis)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: torch.Tensor | None,
    *,
    compute: Attend,
    comm_type: str,
    group: dist.ProcessGroup,
    kernel: BlockKernel | None = None,
) -> torch.Tensor:
    """Causal attention of this rank's rows, (b, heads, own rows, d). Collective over the group.

    Args:
        query: (b, heads, own rows, d); key and value: (b, query groups, own rows, d).
        allowed: (b or 1, 1, s, s), whole: True where attention is allowed. None: causal.
        compute: attention on one rank.
        kernel: computes blocks of causal attention; None: `compute` has to do it.
    """
    if comm_type == A2A:
        whole = [_HeadsForRows.apply(each, group) for each in (query, key, value)]
        output: torch.Tensor = _RowsForHeads.apply(compute(*whole, allowed), group)
        return output
    if kernel is not None and allowed is None:
        attention: Any = _RingAttention if comm_type == P2P else _GatheredAttention
        merged: torch.Tensor = attention.apply(query, key, value, group, kernel)
        return merged
    key, value = (_GatherRows.apply(each, group) for each in (key, value))
    rows = _own_rows(key.shape[2], group, key.device)
    if allowed is None:
        allowed = rows[:, None] >= torch.arange(key.shape[2], device=key.device)
    else:
        allowed = allowed.index_select(2, rows)
    return compute(query, key, value, allowed)


def _own_rows(sequence: int, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    """The positions of this rank's rows."""
    chunks = context_chunks(group.size(), group.rank(), sequence)
    return torch.cat([torch.arange(r.start, r.stop, device=device) for r in chunks])


class _HeadsForRows(torch.autograd.Function):
    """(b, heads, own rows, d) -> (b, own heads, all rows, d), by an all-to-all."""

    @staticmethod
    def forward(ctx: Any, held: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _heads_for_rows(held, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _rows_for_heads(grad, ctx.group), None


class _RowsForHeads(torch.autograd.Function):
    """The inverse of `_HeadsForRows`."""

    @staticmethod
    def forward(ctx: Any, held: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _rows_for_heads(held, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _heads_for_rows(grad, ctx.group), None


def _heads_for_rows(held: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _in_order(_all_to_all(held.chunk(group.size(), 1), group), 2)


def _rows_for_heads(held: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    size = group.size()
    parts = [_own_chunks(held, 2, size=size, rank=rank) for rank in range(size)]
    return torch.cat(_all_to_all(parts, group), 1)


def _all_to_all(parts: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """All-to-all of equal parts, by rank."""
    source = torch.stack(list(parts))
    output = torch.empty_like(source)
    dist.all_to_all_single(output, source, group=group)
    return list(output)


class _GatherRows(torch.autograd.Function):
    """(b, heads, own rows, d) -> all rows; gradients are summed in float32 and scattered."""

    @staticmethod
    def forward(ctx: Any, held: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gather_rows(held, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _scatter_rows(grad.float(), ctx.group).to(grad.dtype), None


def _gather_rows(held: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Along the second last axis."""
    table = held.new_empty((group.size(), *held.shape))
    dist.all_gather_into_tensor(table.flatten(0, 1), held.contiguous(), group=group)
    return _in_order(list(table), held.dim() - 2)


def _scatter_rows(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over the group of this rank's rows, along the second last axis."""
    size, axis = group.size(), whole.dim() - 2
    table = torch.stack([_own_chunks(whole, axis, size=size, rank=rank) for rank in range(size)])
    output = torch.empty_like(table[0])
    dist.reduce_scatter_tensor(output, table.flatten(0, 1), group=group)
    return output


@dataclass(frozen=True)
class _Block:
    """Queries that attend to keys: to all of them, or causally to as many keys as queries."""

    queries: slice
    keys: slice
    is_causal: bool = False


_ALL = slice(None)


class _GatheredAttention(torch.autograd.Function):
    """Attention to gathered keys and values, which are gathered again for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: dist.ProcessGroup,
        kernel: BlockKernel,
    ) -> torch.Tensor:
        held = torch.stack([key, value])
        merged = _OnlineSoftmax(query)
        whole = _gather_rows(held, group)
        for block in _gathered_blocks(query.shape[2], group):
            merged.add(kernel.forward(query, whole[0], whole[1], block), block.queries)
        output = merged.output.to(query.dtype)
        ctx.save_for_backward(query, held, output, merged.lse)
        ctx.group, ctx.kernel = group, kernel
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, held, output, lse = ctx.saved_tensors
        whole = _gather_rows(held, ctx.group)
        dquery = torch.zeros_like(query, dtype=torch.float32)
        dwhole = torch.zeros_like(whole, dtype=torch.float32)
        for block in _gathered_blocks(query.shape[2], ctx.group):
            parts = ctx.kernel.backward(grad, query, *whole, output, lse, block)
            _add_gradients(parts, block, dquery, dwhole)
        dheld = _scatter_rows(dwhole, ctx.group).to(held.dtype)
        return dquery.to(query.dtype), *dheld, None, None


def _gathered_blocks(own_rows: int, group: dist.ProcessGroup) -> Iterator[_Block]:
    """Each chunk attends to itself causally, and to all rows before it."""
    chunk = own_rows // 2
    places = context_chunks(group.size(), group.rank(), own_rows * group.size())
    for queries, rows in zip((slice(chunk), slice(chunk, None)), places, strict=True):
        yield _Block(queries, slice(rows.start, rows.stop), is_causal=True)
        if rows.start:
            yield _Block(queries, slice(rows.start))


class _RingAttention(torch.autograd.Function):
    """Attention to one rank's keys and values after the other, which go round the group.

    Those of the next rank arrive while the kernel computes with those held. In the backward pass
    their gradients follow one step behind, summed in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: dist.ProcessGroup,
        kernel: BlockKernel,
    ) -> torch.Tensor:
        own = held = torch.stack([key, value])
        merged = _OnlineSoftmax(query)
        for step in range(group.size()):
            following = _Shift(held, group) if step + 1 < group.size() else None
            block = _ring_block(step, query.shape[2], group)
            merged.add(kernel.forward(query, held[0], held[1], block), block.queries)
            if following is not None:
                held = following.wait()
        output = merged.output.to(query.dtype)
        ctx.save_for_backward(query, own, output, merged.lse)
        ctx.group, ctx.kernel = group, kernel
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, held, output, lse = ctx.saved_tensors
        group, kernel, dtype = ctx.group, ctx.kernel, held.dtype
        dquery = torch.zeros_like(query, dtype=torch.float32)
        returning: _Shift | None = None
        for step in range(group.size()):
            following = _Shift(held, group) if step + 1 < group.size() else None
            block = _ring_block(step, query.shape[2], group)
            parts = kernel.backward(grad, query, *held, output, lse, block)
            # What the ranks before have added for the rows that are held now.
            dheld = (
                torch.zeros_like(held, dtype=torch.float32)
                if returning is None
                else returning.wait()
            )
            _add_gradients(parts, block, dquery, dheld)
            returning = _Shift(dheld, group, tag=1)
            if following is not None:
                held = following.wait()
        assert returning is not None
        return dquery.to(query.dtype), *returning.wait().to(dtype), None, None


def _ring_block(step: int, own_rows: int, group: dist.ProcessGroup) -> _Block:
    """What this rank computes with the rows of the rank `step` places before it.

    Of two ranks' chunks those of the lower rank are the outer ones: its first precedes both of the
    other's, and its second follows them. So all blocks but the first have the same work.
    """
    if step == 0:
        return _Block(_ALL, _ALL, is_causal=True)
    half = own_rows // 2
    if step <= group.rank():
        return _Block(_ALL, slice(half))
    return _Block(slice(half, None), _ALL)


class _Shift:
    """Sends a tensor to the next rank of the group, and receives that of the previous one.

    Begins at once. All ranks of the group begin the same in the same order, which is what NCCL
    matches messages by; gloo also compares the `tag`.
    """

    def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup, *, tag: int = 0) -> None:
        rank, size = group.rank(), group.size()
        self._sent = tensor
        self._received = torch.empty_like(tensor)
        to, source = (dist.get_global_rank(group, (rank + by) % size) for by in (1, -1))
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, to, group, tag),
                dist.P2POp(dist.irecv, self._received, source, group, tag),
            ]
        )

    def wait(self) -> torch.Tensor:
        """What was received; both tensors may change from now on."""
        for work in self._works:
            work.wait()
        return self._received


class _OnlineSoftmax:
    """The output of blocks, merged in float32 by the log-sum-exp of each query's scores."""

    def __init__(self, query: torch.Tensor) -> None:
        self.output = torch.zeros_like(query, dtype=torch.float32)
        self.lse = query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32)

    def add(self, block: tuple[torch.Tensor, torch.Tensor], queries: slice) -> None:
        output, lse = block
        known, own = self.lse[:, :, queries], self.output[:, :, queries]
        total = torch.logaddexp(known, lse)
        own.mul_((known - total).exp_().unsqueeze(-1))
        own.addcmul_(output.float(), (lse - total).exp_().unsqueeze(-1))
        known.copy_(total)


def _add_gradients(
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    block: _Block,
    dquery: torch.Tensor,
    dheld: torch.Tensor,
) -> None:
    dquery[:, :, block.queries] += parts[0]
    for total, part in zip(dheld, parts[1:], strict=True):
        total[:, :, block.keys] += part


class BlockKernel(ABC):
    """Blocks of attention by one of torch's fused kernels, whose operators give a log-sum-exp.

    NVIDIA and AMD builds of torch have the same operators. One object serves one forward pass of
    attention and its backward pass, whose operators want what those of the forward pass return of
    packed sequences and random numbers. Without packing and dropout that is the same for every
    block, so the last one's is kept.
    """

    def __init__(self, scale: float | None) -> None:
        self._scale = scale
        self._packed: Sequence[torch.Tensor | None] = ()
        """Lengths of packed sequences, of which there are none."""
        self._random: Sequence[torch.Tensor] = ()
        """The state of random numbers, of which none is drawn without dropout."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: _Block
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output (b, heads, queries, d) and log-sum-exp (b, heads, queries), float32."""
        return self._forward(
            query[:, :, block.queries],
            key[:, :, block.keys],
            value[:, :, block.keys],
            block.is_causal,
        )

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        block: _Block,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of the block's queries, keys and values.

        `output` and `lse` are those of all blocks together: the kernels compute the
        probabilities from them.
        """
        queries, keys = block.queries, block.keys
        return self._backward(
            grad[:, :, queries],
            query[:, :, queries],
            key[:, :, keys],
            value[:, :, keys],
            output[:, :, queries],
            lse[:, :, queries].contiguous(),
            block.is_causal,
        )

    @abstractmethod
    def _forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the rows of a block alone."""

    @abstractmethod
    def _backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        is_causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of the rows of a block alone."""


class _CpuFlash(BlockKernel):
    def _forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = (_repeated(each, query) for each in (key, value))
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, scale=self._scale
        )
        return output, lse

    def _backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        is_causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        groups = key.shape[1]
        grad, output, query = (each.contiguous() for each in (grad, output, query))
        key, value = (_repeated(each, query) for each in (key, value))
        dquery, dkey, dvalue = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, output, lse, 0.0, is_causal, scale=self._scale
        )
        return dquery, _summed(dkey, groups), _summed(dvalue, groups)


class _Flash(BlockKernel):
    def _forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, scale=self._scale
        )
        self._packed, self._random = found[2:4], found[6:8]
        return found[0], found[1]

    def _backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        is_causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        lengths = query.shape[2], key.shape[2]
        dquery, dkey, dvalue = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(grad, query, key, value, output, lse, *self._packed, *lengths),
            *(0.0, is_causal, *self._random),
            scale=self._scale,
        )
        return dquery, dkey, dvalue


class _Cudnn(BlockKernel):
    def _forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, is_causal, scale=self._scale
        )
        self._packed, self._random = found[2:4], found[6:8]
        return found[0], found[1].view(query.shape[:3])

    def _backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        is_causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        lengths = query.shape[2], key.shape[2]
        dquery, dkey, dvalue = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(grad, query, key, value, output, lse.unsqueeze(-1), *self._random),
            *(None, *self._packed, *lengths, 0.0, is_causal),
            scale=self._scale,
        )
        return dquery, dkey, dvalue


_ALIGNED_LSE = 32
"""Rows of the log-sum-exp of the memory-efficient kernels, padded."""


class _Efficient(BlockKernel):
    """For float32, which the others do not take, with as many heads of keys as of queries.

    In bfloat16 its backward operator gives infinite gradients for log-sums that are not its own.
    """

    def _forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, lse, *self._random = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, is_causal, scale=self._scale
        )
        return output, lse[:, :, : query.shape[2]]

    def _backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        is_causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        padding = -query.shape[2] % _ALIGNED_LSE
        lse = F.pad(lse, (0, padding), value=torch.inf)
        dquery, dkey, dvalue, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            *(grad.contiguous(), query, key, value, None, output, lse, *self._random),
            *(0.0, [True, True, True, False], is_causal),
            scale=self._scale,
        )
        return dquery, dkey, dvalue


_KERNELS: Mapping[SDPBackend, type[BlockKernel]] = MappingProxyType(
    {
        SDPBackend.CUDNN_ATTENTION: _Cudnn,
        SDPBackend.FLASH_ATTENTION: _Flash,
        SDPBackend.EFFICIENT_ATTENTION: _Efficient,
    }
)


def block_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float | None
) -> BlockKernel | None:
    """The kernel that torch would choose, among those that `sdpa_kernel` allows.

    None for torch's mathematical one, and where none fits.
    """
    if query.device.type == "cpu":
        # With grouped queries torch takes its mathematical kernel on a CPU.
        is_allowed = torch.backends.cuda.flash_sdp_enabled()
        return _CpuFlash(scale) if is_allowed else None
    has_groups = key.shape[1] != query.shape[1]
    try:
        chosen = torch._fused_sdp_choice(
            query, key, value, None, 0.0, True, scale=scale, enable_gqa=has_groups
        )
    except RuntimeError:  # torch has no exception class for "no kernel available"
        return None
    found = _KERNELS.get(SDPBackend(chosen))
    if found is None or (found is _Efficient and query.dtype != torch.float32):
        return None
    return found(scale)


def _repeated(groups: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values of query groups, for each of their heads."""
    each = query.shape[1] // groups.shape[1]
    return groups.repeat_interleave(each, 1) if each > 1 else groups.contiguous()


def _summed(heads: torch.Tensor, groups: int) -> torch.Tensor:
    """Gradients of query groups from those of their heads."""
    return heads.unflatten(1, (groups, -1)).sum(2) if heads.shape[1] != groups else heads
