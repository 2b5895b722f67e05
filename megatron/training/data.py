"""Batches for the stages that need them, from Megatron's indexed datasets.

Only the first stage reads tokens and only the last reads labels, so only they open the data. Every
tensor-parallel rank reads the (memory-mapped) samples itself: the same bits, and no broadcast.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset

from hetero.errors import DataError, UserError
from hetero.formatting import counted
from hetero.plan import Coordinate, Plan
from megatron.training.arguments.batch_sizes import samples_after
from megatron.training.core_private import RewritingConfig, RewritingDataset, lone_rank
from megatron.training.dataset_checks import SPLITS, blends
from megatron.training.fill_in_middle import fill_in_middle

_CANNOT_WRITE = frozenset(
    {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENOSPC, errno.EDQUOT}
)


@dataclass(frozen=True)
class Splits:
    """Samples that the run will draw from each split."""

    train: int
    valid: int
    test: int


def required_samples(args: argparse.Namespace) -> Splits:
    # The last batch of a schedule may go beyond --train-samples.
    train = max(args.train_samples or 0, samples_after(args, args.train_iters))
    rounds = (args.train_iters // args.eval_interval + 1) if args.eval_interval else 1
    per_round = args.eval_iters * args.eval_global_batch_size
    return Splits(train=train, valid=rounds * per_round, test=per_round)


@dataclass(frozen=True)
class Datasets:
    """The three splits: the data where this rank needs it, the sizes on every rank."""

    train: Any | None
    valid: Any | None
    test: Any | None
    sizes: Splits
    absent: frozenset[str]
    """Splits that hold no document and so cannot be drawn from."""


def dataset_config(args: argparse.Namespace, *, tokenizer: Any) -> GPTDatasetConfig:
    """megatron-core's configuration of how samples are made of token files."""
    reordering = fill_in_middle(args, tokenizer)
    rewriting = {} if reordering is None else {"rewrite": reordering.reorder}
    return (RewritingConfig if rewriting else GPTDatasetConfig)(
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
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        # Without it attention is causal inside the kernel, and no mask is ever stored.
        create_attention_mask=args.reset_attention_mask,
        **blends(args),
        **rewriting,
    )


def build_datasets(
    args: argparse.Namespace, *, tokenizer: Any, absent: frozenset[str]
) -> list[Any | None]:
    """Train, validation and test datasets.

    Writes the shuffled indices into the cache, or reads them when they are there. The caller lets
    one rank of a node do so before the others; no process group is needed.
    """
    config = dataset_config(args, tokenizer=tokenizer)
    if config.split_matrix is not None:
        # megatron-core would look for samples in an empty split without end.
        config.split_matrix = [
            None if name in absent else part
            for name, part in zip(SPLITS, config.split_matrix, strict=True)
        ]
    samples = required_samples(args)
    kind = MockGPTDataset if args.mock_data else GPTDataset
    if args.fim_data:
        kind = RewritingDataset
    sizes = [samples.train, samples.valid, samples.test]
    try:
        with lone_rank():
            built = BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config).build()
    except Exception as error:  # a damaged cache raises whatever its bytes happen to say
        raise _not_built(error) from error
    _check_train_split(args, built[0])
    for split in built:
        for dataset in getattr(split, "datasets", [split] if split is not None else []):
            # Else what pads the first sample that a process reads, or only looks like padding, is
            # left out of the loss of every other: in the mask of the first, kept for all.
            dataset.masks_and_position_ids_are_cacheable = False
    return list(built)


def _not_built(error: Exception) -> UserError:
    """What to do about it: data are often kept where nothing can be written."""
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    if isinstance(error, OSError) and error.errno in _CANNOT_WRITE:
        return UserError(
            f"the sample indexes cannot be stored ({reason}); give --data-cache-path a folder that "
            "can be written and has room"
        )
    return UserError(
        f"the datasets could not be built ({reason}); look at --data-path and --split, and "
        "delete the index cache (--data-cache-path, or the folder PREFIX/cache of each dataset)"
    )


def _check_train_split(args: argparse.Namespace, train: Any) -> None:
    """Refuse a training split too small for one step."""
    stride = args.micro_batch_size * sum(args.data_shares)
    if args.skip_train:
        return
    if train is None or len(train) < stride:
        raise UserError(
            f"the training split gives {counted(0 if train is None else len(train), 'sample')} of "
            f"{counted(args.seq_length, 'token')} but one step over all ranks takes {stride}; use "
            "more text or a larger first number in --split"
        )


def places_in_row(shares: Sequence[int], data_rank: int) -> tuple[int, ...]:
    """Which micro-batches of a row a data-parallel rank takes.

    Micro-batches are dealt out in turns until each rank has its share of them. So with equal shares
    of one, rank 0 takes the first of every row, rank 1 the second, and so on, as in Megatron.
    """
    turns = [
        rank for turn in range(max(shares)) for rank, share in enumerate(shares) if share > turn
    ]
    return tuple(place for place, rank in enumerate(turns) if rank == data_rank)


class SequentialSampler:
    """Indices of this data-parallel rank's micro-batches, in order, from `consumed` samples on.

    Samples come in rows of as many micro-batches as `shares` add up to.
    """

    def __init__(
        self,
        *,
        total: int,
        consumed: int,
        micro_batch_size: int,
        data_rank: int,
        shares: Sequence[int],
    ) -> None:
        self._total, self._consumed = total, consumed
        self._micro_batch_size = micro_batch_size
        self._stride = micro_batch_size * sum(shares)
        self._places = places_in_row(shares, data_rank)

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(self._consumed, self._total - self._stride + 1, self._stride):
            for place in self._places:
                first = start + place * self._micro_batch_size
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
        shares: Sequence[int],
        seed: int,
    ) -> None:
        self._total, self._consumed, self._seed = total, consumed, seed
        self._micro_batch_size = micro_batch_size
        self._stride = micro_batch_size * sum(shares)
        self._places = places_in_row(shares, data_rank)

    def __iter__(self) -> Iterator[list[int]]:
        stride = self._stride
        usable = self._total // stride * stride
        if usable == 0:
            return
        for epoch in itertools.count(self._consumed // usable):
            generator = torch.Generator().manual_seed(self._seed + epoch)
            order = torch.randperm(self._total, generator=generator)[:usable].tolist()
            skip = self._consumed % usable if epoch == self._consumed // usable else 0
            for start in range(skip, usable - stride + 1, stride):
                for place in self._places:
                    first = start + place * self._micro_batch_size
                    yield order[first : first + self._micro_batch_size]


class MicroBatches(Iterator[dict[str, torch.Tensor]]):
    """A loader's batches, checked and on the device, and the time for which they kept the host.

    The copy to the device is not counted: where the host has enqueued far ahead, it waits there for
    the GPU and not for data.
    """

    def __init__(
        self,
        loader: Iterable[dict[str, torch.Tensor]],
        *,
        device: torch.device,
        vocab_size: int,
        deadline: float = 0.0,
    ) -> None:
        """`deadline`: seconds after which the loader raises a RuntimeError; 0 where it has none."""
        self._loader, self._device, self._vocab_size = loader, device, vocab_size
        self._deadline = deadline
        self._batches: Iterator[dict[str, torch.Tensor]] | None = None
        self._seconds = 0.0

    def __next__(self) -> dict[str, torch.Tensor]:
        began = time.perf_counter()
        try:
            if self._batches is None:
                self._batches = iter(self._loader)  # Starts the loader's processes.
            batch = next(self._batches)
            _require_known_tokens(batch, self._vocab_size)
        except RuntimeError as error:
            if self._deadline and time.perf_counter() - began >= self._deadline:
                raise DataError(
                    f"no batch came from the loader's workers for {self._deadline:.0f} s; see "
                    "whether the data's file system answers and what the workers said above, or "
                    "try --num-workers 0"
                ) from error
            raise
        finally:
            self._seconds += time.perf_counter() - began
        return {name: tensor.to(self._device, non_blocking=True) for name, tensor in batch.items()}

    def take_wait(self) -> float:
        """Seconds spent on the loader since the last call of this."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def micro_batches(
    args: argparse.Namespace,
    dataset: Any,
    *,
    coordinate: Coordinate,
    plan: Plan,
    consumed: int,
    device: torch.device,
    cyclic: bool,
    micro_batch_size: int,
) -> MicroBatches:
    """Endless for a cyclic order; otherwise until the samples run out."""
    place: dict[str, Any] = {
        "total": len(dataset),
        "consumed": consumed,
        "micro_batch_size": micro_batch_size,
        "data_rank": coordinate.data,
        "shares": plan.shares(coordinate.stage),
    }
    sampler = CyclicSampler(seed=args.seed, **place) if cyclic else SequentialSampler(**place)
    deadline = _loader_deadline(args) if args.num_workers else 0.0
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=args.num_workers,
        pin_memory=device.type == "cuda",
        persistent_workers=args.num_workers > 0,
        timeout=deadline,
        # Its own generator: the loader would otherwise draw from the one that dropout uses.
        generator=torch.Generator(),
    )
    return MicroBatches(
        loader, device=device, vocab_size=args.tokenizer_vocab_size, deadline=deadline
    )


def _loader_deadline(args: argparse.Namespace) -> float:
    """Seconds after which a rank says that no data comes, before who waits for it gives up."""
    return 0.9 * min(args.hetero_timeout, 60.0 * args.distributed_timeout_minutes)


def _require_known_tokens(batch: dict[str, torch.Tensor], vocab_size: int) -> None:
    """Tokens of another tokenizer would train in silence where the vocabulary is split."""
    largest = max(int(batch[name].max()) for name in ("tokens", "labels"))
    if largest >= vocab_size:
        raise DataError(
            f"the data holds token {largest} but the tokenizer has {vocab_size}; preprocess the "
            "text with the tokenizer that this run names"
        )


def chunk_iterators(
    args: argparse.Namespace,
    dataset: Any,
    *,
    coordinate: Coordinate,
    plan: Plan,
    consumed: int,
    device: torch.device,
    cyclic: bool = False,
    micro_batch_size: int | None = None,
) -> list[Iterator[Any]]:
    """One iterator for each model chunk of this rank; chunks in the middle need no batch.

    `micro_batch_size` is that of training where it is left out.
    """
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
                    micro_batch_size=micro_batch_size or args.micro_batch_size,
                )
            )
        else:
            iterators.append(itertools.repeat({}))
    return iterators


def needs_data(args: argparse.Namespace, plan: Plan, coordinate: Coordinate) -> bool:
    return coordinate.stage in (0, plan.stages - 1) or bool(args.reset_attention_mask)
