"""Samplers that give every rank its share of each global batch, and the weight of its loss."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from hetero.data.shares import Shares
from hetero.errors import UserError
from hetero.text import counted


class ShareBatchSampler(Sampler[list[int]]):
    """For DataLoader(batch_sampler=...): in each step, the indices of this rank's share.

    The global batches are those of one process with the whole batch: the order follows from `seed`
    and the epoch alone, and the ranks' parts in a row are the batch. Shares may change between
    steps (`set_shares`); the batches do not. Raises UserError with all that is wrong.
    """

    def __init__(
        self,
        dataset: Sized | int,
        shares: Shares,
        *,
        rank: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        self.length = _length(dataset)
        self.shares = shares
        """The shares of the next batch, unless `set_shares` has set others for it."""
        self.rank, self.seed, self.shuffle, self.drop_last = rank, seed, shuffle, drop_last
        self.epoch = 0
        self._next = 0  # the epoch's next batch
        self._first = 0  # where the next __iter__ starts
        self._pending: dict[int, Shares] = {}
        self._check()

    def _check(self) -> None:
        ranks, wrong = len(self.shares.counts), []
        if not 0 <= self.rank < ranks:
            wrong.append(f"rank {self.rank} has no share; the shares are {[*self.shares]}")
        if dist.is_initialized() and ranks > (there := dist.get_world_size()):
            wrong.append(
                f"shares {[*self.shares]} are for {counted(ranks, 'rank')} and there "
                f"{'is' if there == 1 else 'are'} {there}; give one share for each"
            )
        if self.length < self.shares.batch and (self.drop_last or not self.length):
            wrong.append(
                f"{counted(self.length, 'sample')} cannot fill a batch of {self.shares.batch}; "
                "lower the batch"
            )
        if wrong := wrong + self._wrong_with(self.shares):
            raise UserError(f"the batches cannot be shared out: {'; '.join(wrong)}")

    def _wrong_with(self, shares: Shares) -> list[str]:
        """Why some batch of an epoch, such as the last one, cannot be split into these shares."""
        if 0 in shares.counts:
            return [
                f"shares {[*shares]} leave a rank without samples, and all ranks have to take "
                "part in every step; give each at least one, or use fewer ranks"
            ]
        if (tail := self.length % shares.batch) and not self.drop_last:
            try:
                shares.of(tail)
            except UserError as error:
                return [
                    f"of {counted(self.length, 'sample')} the last batch has {tail}, and {error}; "
                    "or use drop_last=True"
                ]
        return []

    @property
    def sampler(self) -> ShareBatchSampler:
        """Itself. Lightning sets the epoch of a batch sampler's sampler."""
        return self

    @property
    def batch_size(self) -> int:
        """Refused: a library that asks would share these batches out among the ranks once more."""
        raise UserError(
            "these batches are shared out to the ranks already; keep the loader from the library "
            "that would do it again: pass none to Accelerate's prepare, return it from the "
            "Trainer's get_train_dataloader, set Lightning's use_distributed_sampler=False"
        )

    def __len__(self) -> int:
        """The number of global batches in an epoch."""
        whole, tail = divmod(self.length, self.shares.batch)
        return whole + (1 if tail and not self.drop_last else 0)

    @property
    def position(self) -> int:
        """The number, over all epochs, of the next batch.

        A DataLoader with workers draws batches ahead of training.
        """
        return self.epoch * len(self) + self._next

    @property
    def newest_shares(self) -> Shares:
        """The shares set last: the same on every rank, however far each has drawn ahead."""
        return self._pending[max(self._pending)] if self._pending else self.shares

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, as in DistributedSampler. That of a loaded state resumes where it was."""
        if epoch < self.epoch:
            self._take_newest()
        if epoch != self.epoch:
            self.epoch, self._first, self._next = epoch, 0, 0

    def _take_newest(self) -> None:
        """Apply the newest shares at once when batches are repeated.

        By position, ranks that have drawn further ahead would differ.
        """
        self.shares, self._pending = self.newest_shares, {}

    def set_shares(self, shares: Shares, *, start: int) -> None:
        """Use other shares from batch number `start` on (see `position`), the same on every rank.

        Raises UserError where that batch has been drawn, or the batch or the ranks are others.
        """
        wrong = []
        if (shares.batch, len(shares.counts)) != (self.shares.batch, len(self.shares.counts)):
            wrong.append(
                f"they are for a batch of {shares.batch} over "
                f"{counted(len(shares.counts), 'rank')}, not of {self.shares.batch} over "
                f"{len(self.shares.counts)}"
            )
        else:
            wrong += self._wrong_with(shares)
        if start < self.position:
            wrong.append(
                f"batch {start} has been drawn; let them start at the highest position of all "
                f"ranks, here {self.position}"
            )
        if wrong:
            raise UserError(f"shares {[*shares]} cannot be set: {'; '.join(wrong)}")
        self._pending[start] = shares

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        batch = self.shares.batch
        if self._first < self._next:  # the same epoch is repeated
            self._take_newest()
        self._next, self._first = self._first, 0
        while self._next < len(self):
            indices = order[self._next * batch : (self._next + 1) * batch]
            for start in sorted(self._pending):
                if start <= self.position:
                    self.shares = self._pending.pop(start)
            self._next += 1
            yield indices[self.shares.of(len(indices)).bounds(self.rank)]

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.length))
        # The same permutation as torch's DistributedSampler.
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self.length, generator=generator).tolist()

    def state_dict(self, *, trained: int | None = None) -> dict[str, Any]:
        """The state of training: the same on every rank, and independent of the number of ranks.

        `trained` is how many batches of this epoch have been trained. Without it, all drawn batches
        count, which is only correct for a DataLoader without workers. Raises UserError where an
        epoch has fewer: a run that resumed there would leave out the rest of the epoch.
        """
        if trained is not None and not 0 <= trained <= len(self):
            raise UserError(
                f"{trained} batches cannot have been trained of epoch {self.epoch}, which has "
                f"{len(self)}; count those of this epoch, not of all"
            )
        return {
            "epoch": self.epoch,
            "batches": self._next if trained is None else trained,
            "shares": list(self.newest_shares),
            **self._fixed(),
        }

    def _fixed(self) -> dict[str, Any]:
        return {
            "samples": self.length,
            "batch": self.shares.batch,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state. Its shares are used if the number of ranks is the same.

        Raises UserError with every difference between the state and this sampler.
        """
        missing = {"epoch", "batches", "shares", *self._fixed()} - state.keys()
        if missing:
            raise UserError(
                f"the sampler's state lacks {', '.join(sorted(missing))}; load one that "
                "state_dict() has returned"
            )
        differ = [
            f"{name} is {value} here and {state[name]} there"
            for name, value in self._fixed().items()
            if state[name] != value
        ]
        if differ:
            raise UserError(
                f"the sampler's state is of other data: {'; '.join(differ)}; resume with the same"
            )
        if len(state["shares"]) == len(self.shares.counts):
            shares = Shares(tuple(state["shares"]), self.shares.granule, self.shares.least)
            if shares.batch != self.shares.batch:
                raise UserError(
                    f"the sampler's state has shares {[*shares]} of a batch of "
                    f"{self.shares.batch}; load one that state_dict() has returned"
                )
            self.shares = shares
        self.epoch, self._first = state["epoch"], state["batches"]
        self._next = self._first
        self._pending.clear()


def _length(dataset: Sized | int) -> int:
    if isinstance(dataset, int):
        return dataset
    try:
        return len(dataset)
    except TypeError as error:
        raise UserError(
            f"the batches cannot be shared out: {type(dataset).__name__} has no length, as an "
            "IterableDataset has none; give a dataset with __len__ and __getitem__, or let each "
            "rank's own stream yield its share"
        ) from error


class ShareSampler(Sampler[int]):
    """For DataLoader(sampler=..., batch_size=shares.counts[rank]): the indices one by one.

    Only for constant shares, since DataLoader's batch_size is constant.
    """

    def __init__(self, batches: ShareBatchSampler) -> None:
        self._batches = batches

    def set_epoch(self, epoch: int) -> None:
        self._batches.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        for batch in self._batches:
            yield from batch

    def __len__(self) -> int:
        """This rank's samples in an epoch."""
        shares, rank = self._batches.shares, self._batches.rank
        whole, tail = divmod(self._batches.length, shares.batch)
        last = shares.of(tail).counts[rank] if tail and not self._batches.drop_last else 0
        return whole * shares.counts[rank] + last


def loss_weight(
    count: int | torch.Tensor, *, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """The number of ranks divided by the sum of `count` over them: a scalar in float64.

    `count` is how many terms this rank's loss has in this step, over all its micro-batches: its
    samples, or its tokens with a label. A tensor on the device that `group` communicates on avoids
    a copy. Multiply each **sum** of losses by the weight (a mean over n by n times the weight). DDP
    and FSDP2 average gradients over ranks, so the result is the gradient of the mean over the
    global batch. The average of the weighted losses over ranks is the loss of the global batch.

    Collective over `group`. Call it before the forward pass, so that it waits for no computation.
    If every count is 0, the loss and the gradients are zero.
    """
    if not isinstance(count, torch.Tensor):
        count = torch.tensor(count, device=_device_of(group))
    total = count.detach().to(torch.float64, copy=True)
    dist.all_reduce(total, group=group)
    return dist.get_world_size(group) / total.clamp(min=1)


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """A device whose tensors a group takes, preferably the CPU."""
    whole = group or dist.distributed_c10d._get_default_group()
    kinds = {device.type for device in whole._device_types}
    if "cpu" in kinds or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
