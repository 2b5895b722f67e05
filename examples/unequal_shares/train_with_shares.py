"""A LLaMA trained by DDP or FSDP2, each rank with the share of the batch that its speed allows.

    HETERO_VENDOR=nvidia,amd HETERO_SLOWDOWN=amd=1.5 python -m hetero.run --standalone \
        --nproc-per-node 2 examples/unequal_shares/train_with_shares.py --with ddp

One machine plays two vendors there (simulated), of which one is slowed down. `--efficiency FILE`
measures what unequal shares gain. Needs PyTorch and this project alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    # As a script, only this file's folder would be importable.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hetero
from examples.unequal_shares.llama import Llama
from hetero.data import (
    Balance,
    ShareBatchSampler,
    Shares,
    loss_weight,
    slow_down,
    vendor_of_each_rank,
)
from hetero.errors import UserError, print_error, write_error_file
from hetero.tools.tool_command_line import Parser

WARM_UP, MEASURED, SETTLING = 3, 5, 2


def wrapped(flags: argparse.Namespace, group: dist.ProcessGroup) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(flags.device):
        model = Llama(flags).to(getattr(torch, flags.dtype))
    slow_down(model)
    if flags.how == "ddp":
        # The buckets are the gradients, which saves memory for one more copy of them.
        return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    mesh = DeviceMesh.from_group(group, flags.device.type)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def made_up_text(flags: argparse.Namespace) -> TensorDataset:
    """Tokens that count up from a random one. The first ones of most samples have no label."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(flags.vocabulary, (flags.samples, 1), generator=generator)
    text = (first + torch.arange(flags.seq_length + 1)) % flags.vocabulary
    labels = text[:, 1:].clone()
    prompt = torch.randint(flags.seq_length // 2, (flags.samples, 1), generator=generator)
    labels[torch.arange(flags.seq_length) < prompt] = -100
    return TensorDataset(text[:, :-1].clone(), labels)


class Training:
    """One model, trained by the ranks of a group. `run` does some steps more."""

    def __init__(
        self,
        flags: argparse.Namespace,
        group: dist.ProcessGroup,
        shares: Shares,
        *,
        measured: bool,
        every: int | None = None,
    ) -> None:
        self._flags, self._group = flags, group
        self.model = wrapped(flags, group)
        # Its states have the parameters' type. Fused, it takes no memory besides.
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=flags.lr, fused=on_gpu(flags)
        )
        self._dataset = made_up_text(flags)
        self.sampler = ShareBatchSampler(
            self._dataset, shares, rank=dist.get_rank(group), seed=1, drop_last=True
        )
        self.balance = (
            Balance(
                self.sampler, self.model, every=every, warm_up=WARM_UP, steps=MEASURED, group=group
            )
            if measured
            else None
        )
        self._batches = self._all_batches()

    def _all_batches(self) -> Iterator[Any]:
        loader = DataLoader(self._dataset, batch_sampler=self.sampler)
        for epoch in range(1 << 30):
            self.sampler.set_epoch(epoch)
            yield from loader

    def run(self, steps: int) -> Iterator[torch.Tensor]:
        """The loss of the global batch, of each step."""
        device = self._flags.device
        for _ in range(steps):
            tokens, labels = (part.to(device) for part in next(self._batches))
            weight = loss_weight((labels != -100).sum(), group=self._group)
            loss = torch.zeros((), device=device, dtype=torch.float64)
            # As many on every rank, of any size: FSDP2 communicates in each.
            many = self._flags.micro_batches
            for number, part in enumerate(
                zip(tokens.tensor_split(many), labels.tensor_split(many), strict=True), start=1
            ):
                with self._gradients_stay_here(number < many):
                    weighted = weight * self.model(*part)
                    weighted.backward()
                loss += weighted.detach()
            self._optimizer.step()
            self._optimizer.zero_grad()
            if self.balance and (shares := self.balance.step(len(tokens))):
                told = ", ".join(f"{1000 * cost:.2f}" for cost in self.balance.seconds_per_sample)
                say(f"shares {[*shares]}, measured at {told} ms a sample")
            dist.all_reduce(loss, group=self._group)
            yield loss / dist.get_world_size(self._group)

    @contextlib.contextmanager
    def _gradients_stay_here(self, stay: bool) -> Iterator[None]:
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(not stay)
            yield
        else:
            assert isinstance(self.model, DistributedDataParallel)
            with self.model.no_sync() if stay else contextlib.nullcontext():
                yield


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def train(flags: argparse.Namespace) -> None:
    world = dist.group.WORLD
    assert world is not None
    shares = Shares.equal(flags.batch_size, dist.get_world_size(), least=flags.micro_batches)
    training = Training(
        flags, world, shares, measured=flags.shares == "measured", every=flags.adjust_every
    )
    seconds, of_cpu, losses = [], [], []
    began = time.perf_counter()
    for step, loss in enumerate(training.run(flags.steps)):
        enqueued = time.perf_counter()
        losses.append(loss.item())
        say(f"step {step} loss {losses[-1]!r}")
        ended = time.perf_counter()
        seconds.append(ended - began)
        of_cpu.append(enqueued - began)
        began = ended
    whole, cpu = (
        1000 * statistics.median(all_of[flags.steps // 3 :]) for all_of in (seconds, of_cpu)
    )
    say(f"{whole:.2f} ms a step, {cpu:.2f} ms until the CPU had enqueued it (medians)")
    if flags.results:
        add_result(
            flags.results,
            flags,
            vendor_of_each_rank(),
            step_ms=whole,
            step_ms_of_cpu=cpu,
            seconds=seconds,
            losses=losses,
            parameters=sum(p.numel() for p in training.model.parameters()),
            peak_memory_bytes=torch.cuda.max_memory_allocated() if on_gpu(flags) else None,
        )


def samples_per_second(
    flags: argparse.Namespace, ranks: list[int], group: dist.ProcessGroup, *, measured: bool
) -> tuple[float, list[int]] | None:
    """What a group reaches with a part of the batch for each of its ranks, and its shares."""
    told: list[Any] = [None] * dist.get_world_size()
    mine = None
    if dist.get_rank() in ranks:
        batch = flags.batch_size * len(ranks) // dist.get_world_size()
        shares = Shares.equal(batch, len(ranks), least=flags.micro_batches)
        training = Training(flags, group, shares, measured=measured)
        for loss in training.run(WARM_UP + MEASURED):
            loss.item()
        while training.balance is not None and not training.balance.is_over:
            next(training.run(1)).item()
        for loss in training.run(SETTLING):
            loss.item()
        began = time.perf_counter()
        for loss in training.run(flags.steps):
            last = loss
        last.item()  # waits for a GPU
        dist.barrier(group=group)
        mine = (batch * flags.steps / (time.perf_counter() - began), [*training.sampler.shares])
        del training
        if on_gpu(flags):
            torch.cuda.empty_cache()
    # The others wait here.
    dist.all_gather_object(told, mine)
    return told[ranks[0]]


def measure_efficiency(flags: argparse.Namespace) -> None:
    """Mixed throughput / (one vendor alone + the other alone), by equal and by unequal shares."""
    vendors = vendor_of_each_rank()
    if len(set(vendors)) < 2:
        raise UserError(
            f"--efficiency compares vendors and all ranks are {vendors[0]}; start it on nodes of "
            "both, or set HETERO_VENDOR=nvidia,amd to simulate"
        )
    members = {v: [r for r, own in enumerate(vendors) if own == v] for v in sorted(set(vendors))}
    groups = {vendor: dist.new_group(ranks) for vendor, ranks in members.items()}
    everyone = list(range(len(vendors)))
    rounds: list[dict[str, Any]] = []
    for number in range(flags.rounds):
        alone = {
            v: samples_per_second(flags, members[v], groups[v], measured=False) for v in members
        }
        assert dist.group.WORLD is not None
        equal = samples_per_second(flags, everyone, dist.group.WORLD, measured=False)
        unequal = samples_per_second(flags, everyone, dist.group.WORLD, measured=True)
        assert equal is not None
        assert unequal is not None
        both = sum(result[0] for result in alone.values() if result is not None)
        result = {
            "samples_per_second": {
                **{f"{v} alone": round(r[0], 3) for v, r in alone.items() if r is not None},
                "equal": round(equal[0], 3),
                "unequal": round(unequal[0], 3),
            },
            "shares": unequal[1],
            "efficiency": {
                "equal": round(equal[0] / both, 4),
                "unequal": round(unequal[0] / both, 4),
            },
        }
        rounds.append(result)
        say(f"round {number}: {json.dumps(result)}")
    medians = {
        how: round(statistics.median(one["efficiency"][how] for one in rounds), 4)
        for how in ("equal", "unequal")
    }
    slowdown = os.environ.get("HETERO_SLOWDOWN", "") or "no slowdown"
    simulated = " (vendors simulated)" * ("HETERO_VENDOR" in os.environ)
    say(f"efficiency with {slowdown}: {medians}{simulated}")
    add_result(flags.efficiency, flags, vendors, rounds=rounds, efficiency=medians)


def add_result(
    path: Path, flags: argparse.Namespace, vendors: list[str], **figures: object
) -> None:
    """Add this run to the list in the file, on rank 0."""
    if dist.get_rank() != 0:
        return
    record = {
        "device": torch.cuda.get_device_name() if on_gpu(flags) else "CPU",
        "torch": torch.__version__,
        "vendors": vendors,
        "simulated": "HETERO_VENDOR" in os.environ,
        "slowdown": os.environ.get("HETERO_SLOWDOWN", ""),
        "flags": {
            name: str(value) if isinstance(value, torch.device | Path) else value
            for name, value in vars(flags).items()
            if name not in ("efficiency", "results")
        },
        **figures,
    }
    path.write_text(json.dumps([*results_in(path), record], indent=1) + "\n")


def results_in(path: Path) -> list[Any]:
    """The runs before this one. Raises ValueError or OSError where a file holds something else."""
    results = json.loads(path.read_text()) if path.exists() else []
    if not isinstance(results, list):
        raise ValueError(f"it holds no list but a {type(results).__name__}")
    return results


def on_gpu(flags: argparse.Namespace) -> bool:
    return bool(flags.device.type == "cuda")


def parse() -> argparse.Namespace:
    parser = Parser((__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--with", dest="how", choices=("ddp", "fsdp2"), default="ddp")
    add("--backend", default="hetero", choices=("hetero", "gloo", "nccl"))
    add("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    add("--layers", type=int, default=2)
    add("--hidden", type=int, default=128)
    add("--ffn", type=int, help="default: 4 times --hidden")
    add("--heads", type=int, default=4)
    add("--kv-heads", type=int, help="heads of keys and values; default: --heads")
    add("--vocabulary", type=int, default=1024)
    add("--seq-length", type=int, default=64)
    add("--batch-size", type=int, default=60, help="samples of all ranks together")
    add("--micro-batches", type=int, default=1, help="passes into which each share is cut")
    add("--samples", type=int, default=6000, help="of the made-up text")
    add("--steps", type=int, default=20)
    add("--lr", type=float, default=1e-3)
    add("--shares", choices=("measured", "equal"), default="measured")
    add("--adjust-every", type=int, metavar="STEPS", help="measure again and again")
    add("--efficiency", type=Path, metavar="FILE", help="compare, and add the result to this JSON")
    add("--rounds", type=int, default=3, help="of --efficiency")
    add("--results", type=Path, metavar="FILE", help="add times, losses and memory to this JSON")
    add("--deterministic", action="store_true", help="the same bits in each run, a little slower")
    flags = parser.parse_args()
    flags.ffn = flags.ffn or 4 * flags.hidden
    flags.kv_heads = flags.heads if flags.kv_heads is None else flags.kv_heads
    sizes = (
        "kv_heads layers hidden heads vocabulary seq_length batch_size micro_batches steps rounds"
    )
    wrong = [
        f"--{name.replace('_', '-')} {getattr(flags, name)} is not above 0"
        for name in sizes.split()
        if getattr(flags, name) < 1
    ]
    if flags.heads > 0 and flags.hidden % (2 * flags.heads):
        wrong.append(f"--hidden {flags.hidden} is no multiple of twice --heads {flags.heads}")
    if flags.kv_heads > 0 and flags.heads % flags.kv_heads:
        wrong.append(f"--heads {flags.heads} is no multiple of --kv-heads {flags.kv_heads}")
    if flags.seq_length < 2:
        wrong.append(f"--seq-length {flags.seq_length} is less than 2")
    for flag, path in (("--efficiency", flags.efficiency), ("--results", flags.results)):
        if path and not path.absolute().parent.is_dir():
            wrong.append(f"{flag} {path}: its folder does not exist; create it")
        elif path:
            try:
                results_in(path)
            except (OSError, ValueError) as error:
                wrong.append(f"{flag} {path} has other contents ({error}); name another file")
    if flags.device.type == "cuda" and not torch.cuda.is_available():
        wrong.append("--device cuda: PyTorch sees no GPU; use --device cpu")
    if wrong:
        raise UserError("; ".join(wrong))
    return flags


def main() -> None:
    try:
        flags = parse()
        if flags.device.type == "cuda":
            flags.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(flags.device)
        if flags.deterministic:
            # cuBLAS reads this when it is first used.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        hetero.register()
        dist.init_process_group(flags.backend)
        if flags.efficiency:
            measure_efficiency(flags)
        else:
            train(flags)
    except UserError as error:
        # All ranks find the same, so one speaks.
        speaks = os.environ.get("RANK", "0") == "0"
        if speaks:
            print_error(str(error))
        write_error_file(str(error), printed=speaks, known_to_all=True)
        sys.exit(2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
