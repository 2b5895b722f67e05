"""Datasets, samplers and data iterators over Megatron's indexed datasets.

Only the first stage needs tokens and only the last needs labels, so only they open the data. Every
tensor- and context-parallel rank reads the memory-mapped samples itself instead of receiving a
broadcast, and keeps its own rows of them. All
ranks check at the start that they have the same tokenizer and the same data (`agree_on_tokenizer`,
`agree_on_datasets`).
"""

from __future__ import annotations

import argparse
import copy
import errno
import itertools
import random
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset

from hetero.errors import Faults, HeteroError, UserError
from hetero.plan import Coordinate, Plan
from hetero.startup.exchange import JobExchanges
from hetero.startup.process import end_with_parent
from hetero.text import counted
from megatron.hetero.arguments.batch import samples_after
from megatron.hetero.checkpoint.index import NEW_RUN, TrainState
from megatron.hetero.context_parallel import slice_batch
from megatron.hetero.core_private import use_whole_reads, without_process_group
from megatron.hetero.dataset_checks import (
    SPLITS,
    blend_config,
    check_datasets,
    named_prefixes,
    require_same_data,
)
from megatron.hetero.multi_token_prediction import shift_batch
from megatron.hetero.tokenizer.build import Tokenizer, build_tokenizer, tokenizer_digest
from megatron.hetero.tokenizer.vocabulary import embedding_rows, known_tokens


@dataclass
class TextDatasetConfig(GPTDatasetConfig):
    """Configuration of a `TextDataset`."""

    digests: Mapping[str, str] = field(default_factory=dict)
    """What the token files of each prefix hold."""
    digest: str = ""
    """The digest of one dataset, a part of the name of its index in the cache."""
    transform: Callable[[numpy.ndarray, int], numpy.ndarray] | None = None
    """(sample, its index) -> sample. Both are integer arrays of seq_length + 1 tokens."""


class TextDataset(GPTDataset):
    """megatron-core's dataset of token files, with an index of samples that follows their contents.

    megatron-core keeps the index in a cache that knows a token file by its path alone, so text that
    was tokenized again to the same files would be read by the old text's index. Applies
    `config.transform` before a sample is cut into tokens and labels.
    """

    config: TextDatasetConfig

    def __init__(
        self,
        indexed_dataset: Any,
        dataset_path: str,
        indexed_indices: numpy.ndarray,
        num_samples: int | None,
        index_split: Any,
        config: TextDatasetConfig,
    ) -> None:
        own = copy.copy(config)
        own.digest = config.digests.get(dataset_path, "")
        super().__init__(
            indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, own
        )

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*GPTDataset._key_config_attributes(), "digest"]

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[numpy.ndarray, ...]:
        # Later releases also return the documents' lengths.
        sample, *others = super()._query_document_sample_shuffle_indices(idx)
        if self.config.transform is not None:
            sample = self.config.transform(sample, int(idx))
        return sample, *others


_TOKENS = ("prefix", "middle", "suffix", "pad", "eod")


@dataclass(frozen=True, kw_only=True)
class FillInMiddle:
    """--fim-data: reorders documents so that a model learns infilling; rates are probabilities.

    A document is split into prefix, middle and suffix at two random characters, and becomes
    `<prefix> prefix <suffix> suffix <middle> middle` (PSM) or `<prefix> <suffix> suffix <middle>
    prefix middle` (SPM). Megatron-LM's GPTFIMDataset draws from one generator in reading order.
    Here random choices depend on the seed and the sample's index only: the first stage's tokens and
    the last stage's labels must agree, for any number of workers, any layout and after a restart.
    """

    tokenizer: Tokenizer
    seed: int
    rate: float
    """That a document is reordered."""
    spm_rate: float
    """That a reordered text uses the SPM form."""
    fragment_rate: float | None
    """That a fragment between two `separator` tokens is reordered."""
    no_prefix: str | None
    """Text that begins with this is never reordered."""
    prefix: int
    middle: int
    suffix: int
    pad: int
    ends: frozenset[int]
    """Tokens that end a document."""
    separator: int | None

    @property
    def ids(self) -> list[int | None]:
        """Token ids that must be the same on every node."""
        return [
            *(self.prefix, self.middle, self.suffix, self.pad),
            *sorted(self.ends),
            self.separator,
        ]

    def reorder(self, sample: numpy.ndarray, index: int) -> numpy.ndarray:
        """Reorder the sample (int64) with this index in its dataset; the length does not change.

        The result is truncated or padded at its end.
        """
        # Use random.Random.random() only: it alone is guaranteed to be the same in all Python
        # versions, and the vendors' installations may differ.
        rng = random.Random(f"{self.seed} {index}")
        parts: list[numpy.ndarray] = []
        for document, end in _split_at(sample, self.ends):
            parts += [self._document(document, rng), end]
        found = numpy.concatenate(parts)[: len(sample)]
        padding = numpy.full(len(sample) - len(found), self.pad)
        return numpy.concatenate([found, padding]).astype(numpy.int64)

    def _document(self, tokens: numpy.ndarray, rng: random.Random) -> numpy.ndarray:
        if self.separator is None or self.fragment_rate is None or self.separator not in tokens:
            return self._text(tokens, self.rate, rng)
        if rng.random() >= self.rate:
            return tokens
        parts: list[numpy.ndarray] = []
        for fragment, separator in _split_at(tokens, {self.separator}):
            parts += [self._text(fragment, self.fragment_rate, rng), separator]
        return numpy.concatenate(parts)

    def _text(self, tokens: numpy.ndarray, rate: float, rng: random.Random) -> numpy.ndarray:
        if not len(tokens) or rng.random() >= rate:
            return tokens
        begin = self.tokenizer.begin
        begin = begin if tuple(tokens[: len(begin)]) == begin else ()
        text = self.tokenizer.detokenize(tokens)
        if not text or (self.no_prefix is not None and text.startswith(self.no_prefix)):
            return tokens
        first, last = sorted(int(rng.random() * (len(text) + 1)) for _ in range(2))
        prefix, middle, suffix = (
            self.tokenizer.text_ids(part) for part in (text[:first], text[first:last], text[last:])
        )
        if rng.random() < self.spm_rate:
            order = [*begin, self.prefix, self.suffix, *suffix, self.middle, *prefix, *middle]
        else:
            order = [*begin, self.prefix, *prefix, self.suffix, *suffix, self.middle, *middle]
        return numpy.array(order, dtype=numpy.int64)


def _split_at(
    tokens: numpy.ndarray, ends: Collection[int]
) -> Iterator[tuple[numpy.ndarray, numpy.ndarray]]:
    """Split at the tokens in `ends`: (span, the end token after it); the last span has none."""
    begin = 0
    for end in map(int, numpy.flatnonzero(numpy.isin(tokens, list(ends)))):
        yield tokens[begin:end], tokens[end : end + 1]
        begin = end + 1
    yield tokens[begin:], tokens[len(tokens) :]


def fill_in_middle(args: argparse.Namespace, tokenizer: Tokenizer) -> FillInMiddle | None:
    """The transform that --fim-data asks for; None without it.

    Raises UserError if the tokenizer lacks one of the named tokens or cannot decode to text.
    """
    if not args.fim_data:
        return None
    _require_text(args, tokenizer)
    flags = [f"fim_{part}_token" for part in _TOKENS]
    if args.fim_split_sample is not None:
        flags.append("fim_split_sample")
    ids = {flag: _token_id(tokenizer, getattr(args, flag)) for flag in flags}
    if lacking := [flag for flag, found in ids.items() if found is None]:
        raise _missing_tokens(args, lacking, _token_name(tokenizer, tokenizer.eod))
    known = {flag: found for flag, found in ids.items() if found is not None}
    return FillInMiddle(
        tokenizer=tokenizer,
        seed=args.seed,
        rate=args.fim_rate,
        spm_rate=args.fim_spm_rate,
        fragment_rate=args.fim_fragment_rate,
        no_prefix=args.fim_no_prefix,
        prefix=known["fim_prefix_token"],
        middle=known["fim_middle_token"],
        suffix=known["fim_suffix_token"],
        pad=known["fim_pad_token"],
        # hetero preprocess-data ends documents with the tokenizer's own eod.
        ends=frozenset({known["fim_eod_token"], tokenizer.eod}),
        separator=known.get("fim_split_sample"),
    )


def _require_text(args: argparse.Namespace, tokenizer: Tokenizer) -> None:
    try:
        tokenizer.detokenize(tokenizer.text_ids("text"))
    except Exception as error:
        raise UserError(
            "--fim-data needs a tokenizer that turns tokens into text and back, and "
            f"--tokenizer-type {args.tokenizer_type} does not; name one of text"
        ) from error


def _missing_tokens(args: argparse.Namespace, flags: list[str], end: str | None) -> UserError:
    named = [f"{getattr(args, flag)} (--{flag.replace('_', '-')})" for flag in flags]
    own_end = f"; its documents end with {end}" if "fim_eod_token" in flags and end else ""
    return UserError(
        f"--fim-data: the tokenizer has no token {', '.join(named)}; add what is missing with "
        f"--tokenizer-special-tokens, or name tokens that it has{own_end}"
    )


def _token_id(tokenizer: Tokenizer, name: str) -> int | None:
    """The id of a token; None if there is none (libraries then return the unknown token)."""
    try:
        (found,) = tokenizer.library_tokenizer.tokens_to_ids([name])
    except Exception:  # each library has its own
        return None
    return found if isinstance(found, int) and _token_name(tokenizer, found) == name else None


def _token_name(tokenizer: Tokenizer, token: int) -> str | None:
    try:
        (name,) = tokenizer.library_tokenizer.ids_to_tokens([token])
    except Exception:  # each library has its own
        return None
    return name if isinstance(name, str) else None


_NO_DIGESTS: Mapping[str, str] = MappingProxyType({})
_CANNOT_WRITE = frozenset(
    {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENOSPC, errno.EDQUOT}
)


@dataclass(frozen=True)
class SplitSizes:
    """Number of samples per split."""

    train: int
    valid: int
    test: int


def required_samples(args: argparse.Namespace, begun: TrainState = NEW_RUN) -> SplitSizes:
    """Samples that the run will consume from each split, those before `begun` included."""
    steps = max(0, args.train_iters - begun.iteration)
    consumed = samples_after(args, steps, consumed=begun.consumed_train_samples)
    # The last batch of a batch-size schedule may go beyond --train-samples.
    train = max(args.train_samples or 0, consumed)
    evaluates_often = args.eval_interval and not args.skip_train
    rounds = (args.train_iters // args.eval_interval + 1) if evaluates_often else 1
    per_round = args.eval_iters * args.eval_global_batch_size
    return SplitSizes(train=train, valid=rounds * per_round, test=per_round)


@dataclass(frozen=True)
class Datasets:
    """The train, valid and test datasets (None on ranks that read no data) and their sizes."""

    train: Any | None
    valid: Any | None
    test: Any | None
    sizes: SplitSizes
    empty_splits: frozenset[str]
    """Names of splits without documents."""


def dataset_config(
    args: argparse.Namespace, *, tokenizer: Any, digests: Mapping[str, str] = _NO_DIGESTS
) -> TextDatasetConfig:
    """megatron-core's dataset configuration, from the flags. `digests` are those of prefixes."""
    fim = fill_in_middle(args, tokenizer)
    return TextDatasetConfig(
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
        # Otherwise attention is causal inside the kernel and needs no mask.
        create_attention_mask=args.reset_attention_mask,
        digests=digests,
        transform=None if fim is None else fim.reorder,
        **blend_config(args),
    )


def build_datasets(
    args: argparse.Namespace,
    *,
    tokenizer: Any,
    empty_splits: frozenset[str],
    digests: Mapping[str, str] = _NO_DIGESTS,
    begun: TrainState = NEW_RUN,
) -> list[Any | None]:
    """Build the train, valid and test datasets, as long as a run needs that resumes from `begun`.

    Needs no process group. Writes the sample indexes to the cache, or reads them if they exist.
    The caller must let one rank per node finish before the others start.
    """
    config = dataset_config(args, tokenizer=tokenizer, digests=digests)
    samples = required_samples(args, begun)
    # megatron-core loops forever on an empty split, and indexes one that no evaluation reads.
    unread = frozenset() if args.eval_iters else {"valid", "test"}
    if config.split_matrix is not None:
        config.split_matrix = [
            None if name in empty_splits | unread else part
            for name, part in zip(SPLITS, config.split_matrix, strict=True)
        ]
    kind = MockGPTDataset if args.mock_data else TextDataset
    sizes = [samples.train, samples.valid, samples.test]
    try:
        with without_process_group(), use_whole_reads():
            built = BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config).build()
    except Exception as error:  # a damaged cache raises arbitrary exceptions
        raise _build_error(error) from error
    _check_train_split(args, built[0])
    for split in built:
        for dataset in getattr(split, "datasets", [split] if split is not None else []):
            # megatron-core caches the loss mask of the first sample that a process reads, with that
            # sample's padding masked out, and reuses it for every other sample.
            dataset.masks_and_position_ids_are_cacheable = False
    return list(built)


def _build_error(error: Exception) -> UserError:
    """The error to show when megatron-core cannot build a dataset, with a remedy."""
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    # Of a disk that becomes full during a write, numpy tells in words alone.
    is_short_write = isinstance(error, OSError) and reason.endswith(" written")
    if is_short_write or getattr(error, "errno", None) in _CANNOT_WRITE:
        return UserError(
            f"the sample indexes cannot be stored ({reason}); give --data-cache-path a folder that "
            "can be written and has room"
        )
    return UserError(
        f"the datasets could not be built ({reason}); look at --data-path and --split, and "
        "delete the index cache (--data-cache-path, or the folder PREFIX/cache of each dataset)"
    )


def _check_train_split(args: argparse.Namespace, train: Any) -> None:
    """Raise UserError if the training split is too small for one step."""
    stride = args.micro_batch_size * sum(args.data_shares)
    if args.skip_train:
        return
    if train is None or len(train) < stride:
        raise UserError(
            f"the training split gives {counted(0 if train is None else len(train), 'sample')} of "
            f"{counted(args.seq_length, 'token')} but one step over all ranks takes {stride}; use "
            "more text or a larger first number in --split"
        )


def micro_batch_slots(shares: Sequence[int], data_rank: int) -> tuple[int, ...]:
    """Positions of a data-parallel rank's micro-batches among the sum(shares) of one row.

    Micro-batches are assigned round-robin until each rank has its share. With shares of one this
    is Megatron's order: rank 0 takes the first of every row, rank 1 the second, and so on.
    """
    owners = [
        rank for turn in range(max(shares)) for rank, share in enumerate(shares) if share > turn
    ]
    return tuple(slot for slot, rank in enumerate(owners) if rank == data_rank)


class SequentialSampler:
    """Batch sampler: this data-parallel rank's micro-batches in order, from sample `consumed` on.

    One row is sum(shares) consecutive micro-batches; an incomplete last row is dropped. An endless
    one goes on with the first sample.
    """

    def __init__(
        self,
        *,
        total: int,
        consumed: int,
        micro_batch_size: int,
        data_rank: int,
        shares: Sequence[int],
        endless: bool = False,
    ) -> None:
        self._total, self._consumed = total, consumed
        self._micro_batch_size = micro_batch_size
        self._stride = micro_batch_size * sum(shares)
        self._slots = micro_batch_slots(shares, data_rank)
        self._repeats = endless and total >= self._stride

    def __iter__(self) -> Iterator[list[int]]:
        later_passes = itertools.repeat(0) if self._repeats else ()
        for begin in itertools.chain([self._consumed], later_passes):
            for start in range(begin, self._total - self._stride + 1, self._stride):
                for slot in self._slots:
                    first = start + slot * self._micro_batch_size
                    yield list(range(first, first + self._micro_batch_size))


class CyclicSampler:
    """Endless SequentialSampler over a new permutation of the samples in every epoch."""

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
        self._slots = micro_batch_slots(shares, data_rank)

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
                for slot in self._slots:
                    first = start + slot * self._micro_batch_size
                    yield order[first : first + self._micro_batch_size]


class MicroBatches(Iterator[dict[str, torch.Tensor]]):
    """Iterator over a loader's batches: checks them, moves them to the device, times the loader.

    The copy to the device is not timed: it may block on the GPU rather than on data.
    """

    def __init__(
        self,
        loader: Iterable[dict[str, torch.Tensor]],
        *,
        device: torch.device,
        vocab_size: int,
        context_size: int = 1,
        context_rank: int = 0,
        mtp_layers: int = 0,
        deadline: float = 0.0,
    ) -> None:
        """`deadline`: the loader's timeout in seconds, after which it raises RuntimeError, or 0.

        Of each sequence the batches have the rows of `context_rank` among `context_size` ranks, and
        what so many MTP layers see and predict.
        """
        self._loader, self._device, self._vocab_size = loader, device, vocab_size
        self._shift = partial(shift_batch, layers=mtp_layers)
        self._slice = partial(slice_batch, size=context_size, rank=context_rank)
        self._deadline = deadline
        self._batches: Iterator[dict[str, torch.Tensor]] | None = None
        self._seconds = 0.0

    def __next__(self) -> dict[str, torch.Tensor]:
        began = time.perf_counter()
        try:
            if self._batches is None:
                self._batches = iter(self._loader)  # starts the loader's worker processes
            batch = next(self._batches)
            _check_token_ids(batch, self._vocab_size)
        except RuntimeError as error:
            if self._deadline and time.perf_counter() - began >= self._deadline:
                raise HeteroError(
                    f"no batch came from the loader's workers for {self._deadline:.0f} s; see "
                    "whether the data's file system answers and what the workers said above, or "
                    "try --num-workers 0"
                ) from error
            raise
        finally:
            self._seconds += time.perf_counter() - began
        batch = self._slice(self._shift(batch))
        return {name: tensor.to(self._device, non_blocking=True) for name, tensor in batch.items()}

    def pop_wait_seconds(self) -> float:
        """Seconds spent waiting for the loader since the previous call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def build_micro_batches(
    args: argparse.Namespace,
    dataset: Any,
    *,
    coordinate: Coordinate,
    plan: Plan,
    consumed: int,
    device: torch.device,
    endless: bool,
    micro_batch_size: int,
    mtp_layers: int,
) -> MicroBatches:
    """This rank's micro-batches of a dataset, in the order of --dataloader-type.

    `mtp_layers`: how many the chunk has that they are for.
    """
    common: dict[str, Any] = {
        "total": len(dataset),
        "consumed": consumed,
        "micro_batch_size": micro_batch_size,
        "data_rank": coordinate.data,
        "shares": plan.shares(coordinate.stage),
    }
    sampler: CyclicSampler | SequentialSampler
    if args.dataloader_type == "cyclic":
        sampler = CyclicSampler(seed=args.seed, **common)
    else:
        sampler = SequentialSampler(endless=endless, **common)
    deadline = _loader_deadline(args) if args.num_workers else 0.0
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=args.num_workers,
        pin_memory=device.type == "cuda",
        persistent_workers=args.num_workers > 0,
        timeout=deadline,
        worker_init_fn=_end_with_rank,
        # Otherwise the loader would advance the global generator, which dropout uses.
        generator=torch.Generator(),
    )
    return MicroBatches(
        loader,
        device=device,
        vocab_size=known_tokens(args),
        context_size=plan.meshes[coordinate.mesh].context,
        context_rank=coordinate.context,
        mtp_layers=mtp_layers,
        deadline=deadline,
    )


def _end_with_rank(_: int) -> None:
    """In a data worker: PyTorch's own look for the rank comes every 5 s.

    Until then it would hold copies of the sockets by which others notice that the rank has ended.
    """
    end_with_parent(signal.SIGKILL)


def _loader_deadline(args: argparse.Namespace) -> float:
    """Loader timeout in seconds: below every timeout of the ranks that wait for this one."""
    return 0.9 * min(args.hetero_timeout, 60.0 * args.distributed_timeout_minutes)


def _check_token_ids(batch: dict[str, torch.Tensor], vocab_size: int) -> None:
    """Refuse ids outside the vocabulary, which a split embedding silently accepts."""
    ends = [batch[name].aminmax() for name in ("tokens", "labels")]
    smallest, largest = min(int(end.min) for end in ends), max(int(end.max) for end in ends)
    if smallest < 0 or largest >= vocab_size:
        raise HeteroError(
            f"the data holds token {smallest if smallest < 0 else largest} but the model knows "
            f"{vocab_size}; preprocess the text with the tokenizer that this run names, without "
            "added tokens for which the model has no row, or restore the files if they were changed"
        )


def build_data_iterators(
    args: argparse.Namespace,
    dataset: Any,
    *,
    coordinate: Coordinate,
    plan: Plan,
    consumed: int,
    device: torch.device,
    endless: bool = False,
    micro_batch_size: int | None = None,
) -> list[Iterator[Any]]:
    """One data iterator per model chunk of this rank; middle chunks get empty batches.

    `micro_batch_size` defaults to --micro-batch-size; `endless` ones begin again at the end.
    """
    iterators: list[Iterator[Any]] = []
    for chunk in range(plan.chunks):
        is_first = coordinate.stage == 0 and chunk == 0
        is_last = coordinate.stage == plan.stages - 1 and chunk == plan.chunks - 1
        needs_mask = args.reset_attention_mask
        if dataset is not None and (is_first or is_last or needs_mask):
            iterators.append(
                build_micro_batches(
                    args,
                    dataset,
                    coordinate=coordinate,
                    plan=plan,
                    consumed=consumed,
                    device=device,
                    endless=endless,
                    micro_batch_size=micro_batch_size or args.micro_batch_size,
                    mtp_layers=(args.mtp_num_layers or 0) if is_last else 0,
                )
            )
        else:
            iterators.append(itertools.repeat({}))
    return iterators


def needs_data(args: argparse.Namespace, plan: Plan, coordinate: Coordinate) -> bool:
    return coordinate.stage in (0, plan.stages - 1) or bool(args.reset_attention_mask)


@dataclass(frozen=True)
class AgreedTokenizer:
    """The tokenizer of all ranks, and what of the data it fits."""

    tokenizer: Any
    empty_splits: frozenset[str]
    """Names of splits without documents."""
    digests: Mapping[str, str]
    """What the token files of each prefix hold."""


def agree_on_tokenizer(
    args: argparse.Namespace, exchanges: JobExchanges, *, read_indexes: bool
) -> AgreedTokenizer:
    """Build the tokenizer and check the data files. Collective; an error on one rank ends all.

    Sets the sizes of the vocabulary. Only one rank per node should `read_indexes`; the result is
    shared with the others.
    """
    faults = Faults()
    read = faults.read(lambda: _read_tokenizer(args))
    data = None
    if not args.mock_data:
        # What the files hold can be compared with a tokenizer alone.
        reads = read_indexes and read is not None
        data = faults.read(lambda: check_datasets(args, read_indexes=reads))
    payload = {
        "host": socket.gethostname(),
        "tokenizer": None if read is None else read[1],
        "absent": [] if data is None else sorted(data.empty_splits),
        "data": [] if data is None else list(data.digests),
    }
    problem = UserError(*faults.sentences) if faults.sentences else None
    payloads = exchanges.exchange("data files", payload=payload, error=problem)
    empty_splits = frozenset(name for record in payloads for name in record["absent"])
    require_same_data(payloads)
    # Every rank has read one, or the exchange has raised.
    assert read is not None
    tokenizer, _ = read
    args.padded_vocab_size = embedding_rows(
        args, args.tokenizer_vocab_size, base_vocab_size=tokenizer.base_vocab_size
    )
    # Each node may have its own names for the same files.
    prefixes = [prefix for prefix, _ in named_prefixes(args)]
    digests = dict(zip(prefixes, payloads[0]["data"], strict=False))
    return AgreedTokenizer(tokenizer, empty_splits, digests)


def _read_tokenizer(args: argparse.Namespace) -> tuple[Any, list[Any]]:
    """This run's tokenizer, and what tells it apart from another. Raises UserError."""
    tokenizer = build_tokenizer(args)
    args.tokenizer_vocab_size = int(tokenizer.vocab_size)
    args.tokenizer_digest = tokenizer_digest(tokenizer)
    args.tokenizer_begin = list(tokenizer.begin)
    fim = fill_in_middle(args, tokenizer)
    special = None if fim is None else fim.ids
    ids = [args.tokenizer_digest, args.tokenizer_begin, special]
    return tokenizer, [args.tokenizer_vocab_size, ids]


def agree_on_datasets(
    args: argparse.Namespace,
    plan: Plan,
    found: AgreedTokenizer,
    exchanges: JobExchanges,
    *,
    begun: TrainState,
    rank: int,
    local_rank: int,
) -> Datasets:
    """Build this rank's datasets, for a run that resumes from `begun`.

    Collective; an error on one rank ends all.
    """
    needed = needs_data(args, plan, plan.coordinate(rank))
    # Rank 0 writes the sample indexes, then local rank 0 of each node that does not share rank 0's
    # file system; all others read them.
    my_turn = 0 if rank == 0 else (1 if local_rank == 0 else 2)
    built: list[Any | None] = [None, None, None]
    sizes = SplitSizes(0, 0, 0)
    for turn in range(3):
        problem: UserError | None = None
        if turn == my_turn and (needed or rank == 0):
            try:
                built = build_datasets(
                    args,
                    tokenizer=found.tokenizer,
                    empty_splits=found.empty_splits,
                    digests=found.digests,
                    begun=begun,
                )
            except UserError as error:
                problem = error
        payload = {"sizes": [0 if split is None else len(split) for split in built]}
        payloads = exchanges.exchange(f"datasets {turn}", payload=payload, error=problem)
        sizes = SplitSizes(*payloads[0]["sizes"])
    train, valid, test = built
    return Datasets(
        train=train, valid=valid, test=test, sizes=sizes, empty_splits=found.empty_splits
    )
