"""Batches for the stages that need them, from Megatron's indexed datasets.

Only the first stage reads tokens and only the last reads labels, so only they open the data. Every
tensor-parallel rank reads the (memory-mapped) samples itself: the same bits, and no broadcast.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import get_blend_from_list

from hetero.errors import UserError
from hetero.plan import Coordinate, Plan

_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_INDEX_HEADER = struct.Struct("<9sQBQQ")
_TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Splits:
    """Samples that the run will draw from each split."""

    train: int
    valid: int
    test: int


def required_samples(args: argparse.Namespace) -> Splits:
    train = args.train_samples or args.train_iters * args.global_batch_size
    rounds = (args.train_iters // args.eval_interval + 1) if args.eval_interval else 1
    per_round = args.eval_iters * args.global_batch_size
    return Splits(train=train, valid=rounds * per_round, test=per_round)


@dataclass(frozen=True)
class IndexSummary:
    """The few numbers of an index that say whether it is whole."""

    documents: int
    sequences: int
    tokens: int


def inspect_index(prefix: str) -> IndexSummary:
    """Check that PREFIX.idx and PREFIX.bin belong together and are whole.

    Raises UserError, in one sentence, naming the file and the remedy.
    """
    remedy = "make it again with tools/preprocess_data.py"
    index, data = Path(prefix + ".idx"), Path(prefix + ".bin")
    for path in (index, data):
        if not path.is_file():
            raise UserError(
                f"the dataset file {path} does not exist; give --data-path the prefix without "
                f".bin or .idx, or {remedy}"
            )
    try:
        with index.open("rb") as stream:
            raw = stream.read(_INDEX_HEADER.size)
        magic, version, code, sequences, documents = _INDEX_HEADER.unpack(raw)
    except (OSError, struct.error) as error:
        raise UserError(f"the dataset index {index} is cut short; {remedy}") from error
    if magic != _INDEX_MAGIC or version != 1 or code not in _TOKEN_BYTES:
        raise UserError(f"{index} is not an index of Megatron's format; {remedy}")
    # Lengths (int32) and offsets (int64) of every sequence, then the document boundaries (int64).
    whole = _INDEX_HEADER.size + sequences * 12 + documents * 8
    if index.stat().st_size < whole:
        raise UserError(
            f"the dataset index {index} is cut short: {index.stat().st_size} bytes of {whole}; "
            f"{remedy}"
        )
    if sequences == 0:
        raise UserError(f"the dataset {prefix} is empty; {remedy}")
    lengths = torch.from_numpy(
        numpy.fromfile(index, dtype=numpy.int32, count=sequences, offset=_INDEX_HEADER.size)
    )
    if int(lengths.min()) < 0:
        raise UserError(f"the dataset index {index} is damaged: a length is negative; {remedy}")
    tokens = int(lengths.to(torch.int64).sum())
    expected = tokens * _TOKEN_BYTES[code]
    if data.stat().st_size < expected:
        raise UserError(
            f"the dataset file {data} is cut short: {data.stat().st_size} bytes of {expected}; "
            f"{remedy}"
        )
    return IndexSummary(documents=max(0, documents - 1), sequences=sequences, tokens=tokens)


def _blend(paths: list[str] | None) -> tuple[list[str], list[float] | None] | None:
    try:
        return get_blend_from_list(paths)
    except (ValueError, AssertionError) as error:
        raise UserError(
            f"--data-path {' '.join(paths or [])} is neither prefixes nor weight-prefix pairs"
        ) from error


def _blends(args: argparse.Namespace) -> dict[str, Any]:
    if args.mock_data:
        return {}
    if args.data_path:
        return {"blend": _blend(args.data_path), "split": args.split}
    per_split = [_blend(getattr(args, f"{name}_data_path")) for name in ("train", "valid", "test")]
    return {"blend_per_split": per_split}


def check_datasets(args: argparse.Namespace) -> None:
    """Refuse missing, damaged or too small data before anything is built from it."""
    blends = _blends(args)
    train_fraction = 1.0
    if "blend" in blends:
        parts = [float(part) for part in args.split.split(",")]
        train_fraction = parts[0] / sum(parts)
    listed = [blends["blend"]] if "blend" in blends else blends.get("blend_per_split", [])
    for position, blend in enumerate(listed):
        for prefix in blend[0] if blend else []:
            summary = inspect_index(prefix)
            if position > 0:
                continue
            usable = int(summary.tokens * train_fraction)
            if usable < args.seq_length + 1:
                raise UserError(
                    f"--seq-length {args.seq_length} is longer than the data: {prefix} holds "
                    f"{summary.tokens} tokens, about {usable} of them for training; use more "
                    "text, a shorter sequence or a larger training part in --split"
                )


@dataclass(frozen=True)
class Datasets:
    """The three splits: the data where this rank needs it, the sizes on every rank."""

    train: Any | None
    valid: Any | None
    test: Any | None
    sizes: Splits


def build_datasets(args: argparse.Namespace, *, tokenizer: Any) -> list[Any | None]:
    """Train, validation and test datasets.

    Writes the shuffled indices into the cache, or reads them when they are there. The caller lets
    one rank of a node do so before the others; no process group is needed.
    """
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        tokenizer=tokenizer,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        # Without it attention is causal inside the kernel, and no mask is ever stored.
        create_attention_mask=args.reset_attention_mask,
        **_blends(args),
    )
    samples = required_samples(args)
    kind = MockGPTDataset if args.mock_data else GPTDataset
    sizes = [samples.train, samples.valid, samples.test]
    try:
        built = BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config).build()
    except (AssertionError, ValueError, IndexError, OSError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(
            f"the datasets could not be built ({reason}); look at --data-path, --split and "
            "--data-cache-path"
        ) from error
    _check_splits(args, *built)
    return list(built)


def _check_splits(args: argparse.Namespace, train: Any, valid: Any, test: Any) -> None:
    """Refuse a split too small for what the run asks of it."""
    stride = args.micro_batch_size * args.data_parallel_size
    if train is None or len(train) < stride:
        raise UserError(
            f"the training split gives {0 if train is None else len(train)} samples of "
            f"{args.seq_length} tokens but one step over all ranks takes {stride}; use more text "
            "or a larger first number in --split"
        )
    if args.eval_iters and args.eval_interval and (valid is None or len(valid) < stride):
        raise UserError(
            f"the validation split gives fewer than {stride} samples of {args.seq_length} tokens; "
            "give --split a larger second number, or use --eval-iters 0"
        )


class SequentialSampler:
    """Indices of this data-parallel rank's micro-batches, in order, from `consumed` samples on."""

    def __init__(
        self, *, total: int, consumed: int, micro_batch_size: int, data_rank: int, data_size: int
    ) -> None:
        self._total, self._consumed = total, consumed
        self._micro_batch_size = micro_batch_size
        self._data_rank, self._data_size = data_rank, data_size

    def __iter__(self) -> Iterator[list[int]]:
        stride = self._micro_batch_size * self._data_size
        for start in range(self._consumed, self._total - stride + 1, stride):
            first = start + self._data_rank * self._micro_batch_size
            yield list(range(first, first + self._micro_batch_size))


class CyclicSampler:
    """As SequentialSampler, but over a new permutation in every epoch, without end."""

    def __init__(
        self,
        *,
        total: int,
        consumed: int,
        micro_batch_size: int,
        data_rank: int,
        data_size: int,
        seed: int,
    ) -> None:
        self._total, self._consumed, self._seed = total, consumed, seed
        self._micro_batch_size = micro_batch_size
        self._data_rank, self._data_size = data_rank, data_size

    def __iter__(self) -> Iterator[list[int]]:
        stride = self._micro_batch_size * self._data_size
        usable = self._total // stride * stride
        if usable == 0:
            return
        for epoch in itertools.count(self._consumed // usable):
            generator = torch.Generator().manual_seed(self._seed + epoch)
            order = torch.randperm(self._total, generator=generator)[:usable].tolist()
            skip = self._consumed % usable if epoch == self._consumed // usable else 0
            for start in range(skip, usable - stride + 1, stride):
                first = start + self._data_rank * self._micro_batch_size
                yield order[first : first + self._micro_batch_size]


def micro_batches(
    args: argparse.Namespace,
    dataset: Any,
    *,
    coordinate: Coordinate,
    plan: Plan,
    consumed: int,
    device: torch.device,
    cyclic: bool,
) -> Iterator[dict[str, torch.Tensor]]:
    """Endless for a cyclic order; otherwise until the samples run out."""
    place: dict[str, Any] = {
        "total": len(dataset),
        "consumed": consumed,
        "micro_batch_size": args.micro_batch_size,
        "data_rank": coordinate.data,
        "data_size": plan.meshes[coordinate.mesh].data,
    }
    sampler = CyclicSampler(seed=args.seed, **place) if cyclic else SequentialSampler(**place)
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=args.num_workers,
        pin_memory=device.type == "cuda",
        persistent_workers=args.num_workers > 0,
        # Its own generator: the loader would otherwise draw from the one that dropout uses.
        generator=torch.Generator(),
    )
    for batch in loader:
        yield {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def chunk_iterators(
    args: argparse.Namespace,
    dataset: Any,
    *,
    coordinate: Coordinate,
    plan: Plan,
    consumed: int,
    device: torch.device,
    cyclic: bool = False,
) -> list[Iterator[Any]]:
    """One iterator for each model chunk of this rank; chunks in the middle need no batch."""
    iterators: list[Iterator[Any]] = []
    for chunk in range(plan.chunks):
        is_first = coordinate.stage == 0 and chunk == 0
        is_last = coordinate.stage == plan.stages - 1 and chunk == plan.chunks - 1
        needs_mask = args.reset_attention_mask
        if dataset is not None and (is_first or is_last or needs_mask):
            iterators.append(
                micro_batches(
                    args,
                    dataset,
                    coordinate=coordinate,
                    plan=plan,
                    consumed=consumed,
                    device=device,
                    cyclic=cyclic,
                )
            )
        else:
            iterators.append(itertools.repeat({}))
    return iterators


def needs_data(args: argparse.Namespace, plan: Plan, coordinate: Coordinate) -> bool:
    return coordinate.stage in (0, plan.stages - 1) or bool(args.reset_attention_mask)
