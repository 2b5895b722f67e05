"""Time every kernel that a layer of LLaMA-8B can use on one GPU, forward and backward.

    python bench/time_kernels.py --out OUT [--tokens 4096] [--only attention ...]

Prints one row per variant: milliseconds of kernels in forward and in backward, as the profiler
counts them. Sizes are those of
LLaMA-8B at sequence 4096; `--tokens 8192` is a micro-batch of two such sequences.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script(core=False)

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from hetero.errors import UserError
from hetero.text import integer
from hetero.tools import tool_command_line
from megatron.hetero.import_core import import_megatron_core

HIDDEN, HEADS, GROUPS, WIDTH, FFN, VOCAB = 4096, 32, 8, 128, 14336, 128256
SEQUENCE = 4096


@dataclass(frozen=True)
class Row:
    kernel: str
    variant: str
    tokens: int
    forward_ms: float
    backward_ms: float
    """Zero where there is only one direction."""
    note: str = ""


def milliseconds(call: Callable[[], Any], *, repeats: int = 10, warmup: int = 3) -> float:
    """Time that kernels of one `call` occupy the device; launches in between are not counted."""
    for _ in range(warmup):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    spent = sum(event.self_device_time_total for event in profiled.key_averages())
    return float(spent) / repeats / 1e3


def random(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_(grad)


def both_ways(
    forward: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]], *inputs: torch.Tensor
) -> tuple[float, float]:
    """Forward and backward time of `forward(*inputs)`."""
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    outputs = forward(*inputs)
    grads = tuple(torch.randn_like(out) for out in _as_tuple(outputs))

    def there_and_back() -> None:
        # Some backward passes overwrite what the forward pass saved, so each has its own.
        torch.autograd.grad(_as_tuple(forward(*inputs)), wanted, grads)

    there = milliseconds(lambda: forward(*inputs))
    return there, milliseconds(there_and_back) - there


def _as_tuple(outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def attention(tokens: int) -> Iterator[tuple[str, float, float]]:
    """Causal grouped-query attention, laid out (s, b, heads, d) as megatron-core has it."""
    shapes = [(SEQUENCE, tokens // SEQUENCE)]
    if tokens > SEQUENCE:
        shapes.append((tokens, 1))
    kernels = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
    }
    for sequence, batch in shapes:
        query, key, value = (random(sequence, batch, n, WIDTH) for n in (HEADS, GROUPS, GROUPS))
        for name, kernel in kernels.items():
            for repeated in (False, True):

                def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                    if repeated:  # noqa: B023
                        k, v = (t.repeat_interleave(HEADS // GROUPS, dim=2) for t in (k, v))
                    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
                    with sdpa_kernel([kernel]):  # noqa: B023
                        out = F.scaled_dot_product_attention(
                            q,
                            k,
                            v,
                            is_causal=True,
                            enable_gqa=not repeated,  # noqa: B023
                        )
                    return out.permute(2, 0, 1, 3).reshape(q.shape[2], q.shape[0], -1)

                label = f"{name}, {'repeated' if repeated else 'grouped'} keys, s={sequence}"
                try:
                    yield label, *both_ways(forward, query, key, value)
                except RuntimeError as error:
                    yield label + f": {str(error).splitlines()[0][:60]}", 0.0, 0.0


def rms_norm(tokens: int) -> Iterator[tuple[str, float, float]]:
    x, weight = random(tokens, 1, HIDDEN), random(HIDDEN)
    yield "torch", *both_ways(lambda x, w: F.rms_norm(x, (HIDDEN,), w, 1e-5), x, weight)

    @torch.compile(dynamic=False)
    def compiled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return (wide * scale).to(x.dtype) * w

    yield "compiled", *both_ways(compiled, x, weight)
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction as Liger

    yield (
        "liger",
        *both_ways(lambda x, w: Liger.apply(x, w, 1e-5, 0.0, "llama", False), x, weight),
    )


def add_and_norm(tokens: int) -> Iterator[tuple[str, float, float]]:
    """Residual addition and the norm behind it, as two kernels and as one."""
    x, residual, weight = random(tokens, 1, HIDDEN), random(tokens, 1, HIDDEN), random(HIDDEN)
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction as Fused
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction as Liger

    def apart(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = x + r
        return Liger.apply(total, w, 1e-5, 0.0, "llama", False), total

    yield "add, liger norm", *both_ways(apart, x, residual, weight)
    yield (
        "liger fused",
        *both_ways(
            lambda x, r, w: Fused.apply(x, r, w, 1e-5, 0.0, "llama", False), x, residual, weight
        ),
    )


def swiglu(tokens: int) -> Iterator[tuple[str, float, float]]:
    y = random(tokens, 1, 2 * FFN)
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

    import_megatron_core()
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    yield "megatron-core, compiled", *both_ways(lambda y: bias_swiglu_impl(y, None), y)

    @torch.compile(dynamic=False)
    def compiled(y: torch.Tensor) -> torch.Tensor:
        gate, up = torch.chunk(y, 2, -1)
        return F.silu(gate) * up

    yield "compiled", *both_ways(compiled, y)
    yield (
        "liger",
        *both_ways(
            lambda y: LigerFusedGateUpSiLUMulFunction.apply(y),
            y.detach().view(tokens, -1).requires_grad_(),
        ),
    )


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = torch.chunk(x, 2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def rotary(tokens: int) -> Iterator[tuple[str, float, float]]:
    """From the fused projection to rotated queries and keys: split, copy, rotation."""
    batch = tokens // SEQUENCE
    mixed = random(SEQUENCE, batch, GROUPS * (HEADS // GROUPS + 2) * WIDTH)
    angles = torch.randn(SEQUENCE, 1, 1, WIDTH, device="cuda")

    def split(mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        grouped = mixed.view(*mixed.shape[:2], GROUPS, -1)
        q, k, v = torch.split(grouped, [HEADS // GROUPS * WIDTH, WIDTH, WIDTH], dim=3)
        return q.reshape(*mixed.shape[:2], HEADS, WIDTH), k, v

    def plain(mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = split(mixed)
        cos, sin = torch.cos(angles).to(q.dtype), torch.sin(angles).to(q.dtype)
        return _rotated(q, cos, sin), _rotated(k, cos, sin), v

    compiled_rotation = torch.compile(
        lambda x, a: _rotated(x, torch.cos(a).to(x.dtype), torch.sin(a).to(x.dtype)), dynamic=False
    )

    def rotation_compiled(mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = split(mixed)
        return compiled_rotation(q, angles), compiled_rotation(k, angles), v

    @torch.compile(dynamic=False)
    def whole(
        mixed: torch.Tensor, angles: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = split(mixed)
        cos, sin = torch.cos(angles).to(q.dtype), torch.sin(angles).to(q.dtype)
        return _rotated(q, cos, sin), _rotated(k, cos, sin), v.contiguous()

    yield "plain", *both_ways(plain, mixed)
    yield "rotation compiled", *both_ways(rotation_compiled, mixed)
    yield "split and rotation compiled", *both_ways(lambda m: whole(m, angles), mixed)
    from megatron.hetero.compiled_kernels import Rotary

    rotary = Rotary()

    def ours(mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = split(mixed)
        return rotary.rotate(q, angles), rotary.rotate(k, angles), v

    def ours_split(mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        widths = [HEADS // GROUPS * WIDTH, WIDTH, WIDTH]
        grouped = mixed.view(*mixed.shape[:2], GROUPS, -1)
        return rotary.split_and_rotate(grouped, angles, angles, widths)

    def liger(mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        from liger_kernel.ops.rope import LigerRopeFunction

        q, k, v = split(mixed)
        cos, sin = (f(angles).view(1, SEQUENCE, WIDTH).to(q.dtype) for f in (torch.cos, torch.sin))
        q, k = LigerRopeFunction.apply(q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), cos, sin)
        return q.permute(2, 0, 1, 3), k.permute(2, 0, 1, 3), v

    yield "liger", *both_ways(liger, mixed)
    yield "ours, after the split", *both_ways(ours, mixed)
    yield "ours, with the split", *both_ways(ours_split, mixed)


def cross_entropy(tokens: int) -> Iterator[tuple[str, float, float]]:
    import torch.distributed as dist

    import_megatron_core()
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    group = dist.group.WORLD
    logits = random(tokens, 1, VOCAB)
    target = torch.randint(0, VOCAB, (tokens, 1), device="cuda")

    def core(x: torch.Tensor) -> torch.Tensor:
        return fused_vocab_parallel_cross_entropy(x, target, group)

    yield "megatron-core, fused", *both_ways(core, logits)

    def unfused(x: torch.Tensor) -> torch.Tensor:
        from megatron.core.tensor_parallel.cross_entropy import _VocabParallelCrossEntropy

        return _VocabParallelCrossEntropy.apply(x, target, 0.0, group)

    try:
        yield "megatron-core, not fused", *both_ways(unfused, logits)
    except Exception as error:
        yield f"megatron-core, not fused: {str(error)[:60]}", 0.0, 0.0

    @torch.compile(dynamic=False)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x.view(-1, VOCAB).float(), target.view(-1), reduction="none")

    yield "compiled", *both_ways(compiled, logits)
    from liger_kernel.ops.vocab_parallel_cross_entropy import LigerVocabParallelCEFunction as Liger

    yield (
        "liger, vocabulary parallel",
        *both_ways(
            lambda x: Liger.apply(x, target, None, -100, 0.0, "megatron", "partition"), logits
        ),
    )
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    def liger(x: torch.Tensor) -> torch.Tensor:
        made = LigerCrossEntropyFunction.apply(
            x.view(-1, VOCAB), target.view(-1), None, -100, 0.0, 0.0, "none"
        )
        return made[0]

    try:
        yield "liger, gradient made in forward", milliseconds(lambda: liger(logits)), 0.0
    except Exception as error:
        yield f"liger: {str(error)[:60]}", 0.0, 0.0


SHAPES = {
    "qkv": (HIDDEN, (HEADS + 2 * GROUPS) * WIDTH),
    "attention out": (HIDDEN, HIDDEN),
    "mlp up": (HIDDEN, 2 * FFN),
    "mlp down": (FFN, HIDDEN),
    "output layer": (HIDDEN, VOCAB),
}


def products(tokens: int) -> Iterator[tuple[str, float, float]]:
    """The three matrix products of each linear layer: forward; and input gradient as backward."""
    for name, (wide_in, wide_out) in SHAPES.items():
        x, weight = random(tokens, wide_in, grad=False), random(wide_out, wide_in, grad=False)
        grad = random(tokens, wide_out, grad=False)
        flops = 2 * tokens * wide_in * wide_out
        forward = milliseconds(lambda: torch.matmul(x, weight.t()))  # noqa: B023
        backward = milliseconds(lambda: grad.matmul(weight))  # noqa: B023
        rates = " ".join(f"{flops / ms / 1e9:.0f}" for ms in (forward, backward))
        yield f"{name} ({rates} TFLOP/s)", forward, backward


def weight_gradient(tokens: int) -> Iterator[tuple[str, float, float]]:
    """Adding one micro-batch's weight gradient to the float32 buffer."""
    for name, (wide_in, wide_out) in SHAPES.items():
        x, grad = random(tokens, wide_in, grad=False), random(tokens, wide_out, grad=False)
        main = torch.zeros(wide_out, wide_in, device="cuda")
        flops = 2 * tokens * wide_in * wide_out
        variants: dict[str, Callable[[], Any]] = {
            "product, then addition": lambda: main.add_(grad.t().matmul(x)),  # noqa: B023
            "addmm into float32": lambda: torch.addmm(
                main,  # noqa: B023
                grad.t(),  # noqa: B023
                x,  # noqa: B023
                out_dtype=torch.float32,
                out=main,  # noqa: B023
            ),
            "product alone": lambda: grad.t().matmul(x),  # noqa: B023
        }
        for variant, call in variants.items():
            taken = milliseconds(call)
            yield f"{name}, {variant} ({flops / taken / 1e9:.0f} TFLOP/s)", taken, 0.0


def embedding(tokens: int) -> Iterator[tuple[str, float, float]]:
    """Gradient of the embedding and its addition to the float32 buffer (as backward)."""
    weight = random(VOCAB, HIDDEN)
    ids = torch.randint(0, VOCAB, (tokens // SEQUENCE, SEQUENCE), device="cuda")
    grad = random(tokens // SEQUENCE, SEQUENCE, HIDDEN, grad=False)
    main = torch.zeros(VOCAB, HIDDEN, device="cuda")

    def dense(lookup: Callable[[], torch.Tensor]) -> Callable[[], Any]:
        output = lookup()
        return lambda: main.add_(torch.autograd.grad(output, weight, grad, retain_graph=True)[0])

    yield "F.embedding, then addition", 0.0, milliseconds(dense(lambda: F.embedding(ids, weight)))
    yield "indexing, then addition", 0.0, milliseconds(dense(lambda: weight[ids]))
    flat_ids, flat = ids.view(-1), grad.view(-1, HIDDEN)
    yield "index_add_", 0.0, milliseconds(lambda: main.index_add_(0, flat_ids, flat.float()))

    def sorted_sum() -> None:
        order = torch.argsort(flat_ids, stable=True)
        main.index_put_((flat_ids[order],), flat[order].float(), accumulate=True)

    yield "index_put_ accumulate", 0.0, milliseconds(sorted_sum)


def adam(tokens: int) -> Iterator[tuple[str, float, float]]:
    """One update of a billion float32 parameters (218 tensors), in milliseconds."""
    for name, flags in {"foreach": {}, "fused": {"fused": True}}.items():
        parameters = [
            torch.zeros(4096, 1120, device="cuda", requires_grad=True) for _ in range(218)
        ]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = torch.optim.AdamW(parameters, **flags)  # type: ignore[arg-type]
        yield name, milliseconds(optimizer.step, repeats=6), 0.0
        del parameters, optimizer


KERNELS = {
    "attention": attention,
    "rms_norm": rms_norm,
    "add_and_norm": add_and_norm,
    "swiglu": swiglu,
    "rotary": rotary,
    "cross_entropy": cross_entropy,
    "products": products,
    "weight_gradient": weight_gradient,
    "embedding": embedding,
    "adam": adam,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = tool_command_line.Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for kernels.json")
    parser.add_argument(
        "--tokens",
        type=integer(1),
        nargs="+",
        default=[4096, 8192],
        help="tokens of a micro-batch, multiples of the sequence",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=sorted(KERNELS),
        default=sorted(KERNELS),
        help="kernels to time",
    )
    options = parser.parse_args(argv)
    if uneven := [tokens for tokens in options.tokens if tokens % SEQUENCE]:
        parser.error(f"--tokens {uneven[0]} is no multiple of the sequence, {SEQUENCE}")
    return tool_command_line.run(lambda: measure(options.out, options.tokens, options.only))


def measure(out: Path, sizes: Sequence[int], kernels: Sequence[str]) -> str:
    """Time the kernels, print their rows and write kernels.json."""
    import torch.distributed as dist

    if not torch.cuda.is_available():
        raise UserError("kernels are timed on a GPU, and PyTorch sees none here")
    tool_command_line.make_results_folder(out)

    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    rows: list[Row] = []
    for kernel in kernels:
        for tokens in sizes if kernel != "adam" else sizes[:1]:
            try:
                for variant, forward, backward in KERNELS[kernel](tokens):
                    rows.append(Row(kernel, variant, tokens, forward, backward))
                    print(f"{kernel:<16}{tokens:>6} {forward:8.3f} {backward:8.3f}  {variant}")
                    sys.stdout.flush()
            except Exception as error:
                print(f"{kernel:<16}{tokens:>6} failed: {error!r:.300}", flush=True)
            torch.cuda.empty_cache()
    record = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rows": [asdict(row) for row in rows],
    }
    (out / "kernels.json").write_text(json.dumps(record, indent=1))
    dist.destroy_process_group()
    return ""


if __name__ == "__main__":
    sys.exit(main())
