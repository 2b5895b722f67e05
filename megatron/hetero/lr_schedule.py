"""The schedule of learning rate and weight decay as plain numbers: from flags or a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from megatron.hetero.arguments.batch import samples_after


@dataclass(frozen=True)
class LrSchedule:
    """The parameters of megatron-core's OptimizerParamScheduler, under its names in a checkpoint.

    Lengths are in samples, so another batch size changes those that flags give in steps.
    """

    init_lr: float
    max_lr: float
    min_lr: float
    decoupled_lr: float | None
    decoupled_min_lr: float | None
    lr_warmup_steps: float
    """As in Megatron, a fraction of the decay is not rounded."""
    lr_decay_steps: int
    lr_decay_style: str
    wsd_decay_steps: int | None
    """Final decay of the WSD style."""
    lr_wsd_decay_style: str
    start_wd: float
    end_wd: float
    wd_incr_steps: int
    """The whole run, over which the weight decay changes."""
    wd_incr_style: str

    @classmethod
    def of_flags(cls, args: argparse.Namespace) -> LrSchedule:
        """Lengths may be given in steps, of which those of a batch-size ramp-up are smaller."""
        warmup: float
        if args.train_samples:
            decay, warmup = args.lr_decay_samples or args.train_samples, args.lr_warmup_samples
            wsd, whole = args.lr_wsd_decay_samples, args.train_samples
        else:
            decay_iters = args.lr_decay_iters or args.train_iters
            decay = samples_after(args, decay_iters)
            warmup = samples_after(args, args.lr_warmup_iters)
            whole = samples_after(args, args.train_iters)
            wsd = None
            if args.lr_wsd_decay_iters is not None:
                wsd = decay - samples_after(args, decay_iters - args.lr_wsd_decay_iters)
        if args.lr_warmup_fraction is not None:
            warmup = args.lr_warmup_fraction * decay
        return cls(
            init_lr=args.lr_warmup_init,
            max_lr=args.lr,
            min_lr=args.min_lr,
            decoupled_lr=args.decoupled_lr,
            decoupled_min_lr=args.decoupled_min_lr,
            lr_warmup_steps=warmup,
            lr_decay_steps=decay,
            lr_decay_style=args.lr_decay_style,
            wsd_decay_steps=wsd,
            lr_wsd_decay_style=args.lr_wsd_decay_style,
            start_wd=args.start_weight_decay,
            end_wd=args.end_weight_decay,
            wd_incr_steps=whole,
            wd_incr_style=args.weight_decay_incr_style,
        )

    def stored(self, record: Mapping[str, Any], args: Mapping[str, Any]) -> LrSchedule:
        """The schedule of a checkpoint, from its record and the flags of the run that saved it.

        Megatron-LM's record lacks some parameters, which only its flags have. What neither has is
        as in this schedule, that of the loading run.
        """
        known = {field.name: record[field.name] for field in fields(self) if field.name in record}
        try:
            of_flags = LrSchedule.of_flags(argparse.Namespace(**args))
        except (AttributeError, TypeError):  # it does not hold all flags
            of_flags = self
        return replace(of_flags, **known)

    def differences(self, there: LrSchedule) -> Iterator[str]:
        """What differs from a checkpoint's, with the flags that set it."""
        here, stored = asdict(self), asdict(there)
        if not self.lr_decay_style == there.lr_decay_style == "WSD":
            for name in ("wsd_decay_steps", "lr_wsd_decay_style"):
                here[name] = stored[name] = None
        for name, flags in _FLAGS.items():
            if stored[name] != here[name]:
                yield f"{flags} is {stored[name]} there and {here[name]} here"

    def set_flags(self, args: argparse.Namespace) -> None:
        """Set the flags that megatron-core's optimizer copies into its groups of parameters."""
        args.lr, args.min_lr = self.max_lr, self.min_lr
        args.decoupled_lr, args.decoupled_min_lr = self.decoupled_lr, self.decoupled_min_lr
        args.start_weight_decay, args.end_weight_decay = self.start_wd, self.end_wd

    def __str__(self) -> str:
        if self.lr_decay_style == "constant":
            return f"constant {self.max_lr:g}"
        return f"{self.lr_decay_style} from {self.max_lr:g} to {self.min_lr:g}"


_FLAGS = {
    "init_lr": "--lr-warmup-init",
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "decoupled_lr": "--decoupled-lr",
    "decoupled_min_lr": "--decoupled-min-lr",
    "lr_warmup_steps": "the warm-up in samples (--lr-warmup-iters times the batch)",
    "lr_decay_steps": "the decay in samples (--lr-decay-iters or --train-iters times the batch)",
    "lr_decay_style": "--lr-decay-style",
    "wsd_decay_steps": "the last decay in samples (--lr-wsd-decay-iters times the batch)",
    "lr_wsd_decay_style": "--lr-wsd-decay-style",
    "start_wd": "--weight-decay or --start-weight-decay",
    "end_wd": "--weight-decay or --end-weight-decay",
    "wd_incr_steps": "the run in samples (--train-iters times the batch)",
    "wd_incr_style": "--weight-decay-incr-style",
}
