"""Checks of the schedules of learning rate and weight decay."""

from argparse import Namespace
from collections.abc import Iterator


def check_schedule(args: Namespace) -> tuple[Iterator[str], ...]:
    return (
        _check_rates(args),
        _check_decoupled_rates(args),
        _check_unit(args),
        _check_lengths(args),
        _check_weight_decay(args),
    )


def _check_rates(args: Namespace) -> Iterator[str]:
    for name in ("min_lr", "lr_warmup_init"):
        if getattr(args, name) > args.lr:
            yield (
                f"--{name.replace('_', '-')} {getattr(args, name):g} must be at most --lr "
                f"{args.lr:g}"
            )


def _check_decoupled_rates(args: Namespace) -> Iterator[str]:
    if args.decoupled_min_lr is not None:
        if args.decoupled_lr is None:
            yield "--decoupled-min-lr needs --decoupled-lr"
        elif args.decoupled_min_lr > args.decoupled_lr:
            yield (
                f"--decoupled-min-lr {args.decoupled_min_lr:g} must be at most --decoupled-lr "
                f"{args.decoupled_lr:g}"
            )


def _check_unit(args: Namespace) -> Iterator[str]:
    """The schedule must be counted in steps or in samples, as the run is."""
    unit, other = ("iters", "samples") if args.train_samples is None else ("samples", "iters")
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        if getattr(args, f"{name}_{other}"):
            flag = f"--{name.replace('_', '-')}"
            yield f"{flag}-{other} cannot go with --train-{unit}; use {flag}-{unit}"
    if args.lr_warmup_fraction is not None and getattr(args, f"lr_warmup_{unit}"):
        yield (
            f"--lr-warmup-fraction and --lr-warmup-{unit} exclude each other; remove one of them"
        )


def _check_lengths(args: Namespace) -> Iterator[str]:
    unit = "iters" if args.train_samples is None else "samples"
    whole = getattr(args, f"train_{unit}")
    if whole is None:
        return
    decay = getattr(args, f"lr_decay_{unit}") or whole
    warmup = getattr(args, f"lr_warmup_{unit}")
    if warmup >= decay:
        yield (
            f"--lr-warmup-{unit} {warmup} must be less than the {decay} {unit} of the decay; "
            f"lower it or raise --lr-decay-{unit}"
        )
    if args.lr_decay_style == "WSD":
        last = getattr(args, f"lr_wsd_decay_{unit}")
        if last is None:
            yield f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}"
        elif last > decay:
            yield (f"--lr-wsd-decay-{unit} {last} must be at most the {decay} {unit} of the decay")


def _check_weight_decay(args: Namespace) -> Iterator[str]:
    if args.weight_decay_incr_style == "constant":
        for end in ("start", "end"):
            if getattr(args, f"{end}_weight_decay") is not None:
                yield (f"--{end}-weight-decay needs --weight-decay-incr-style linear or cosine")
        args.start_weight_decay = args.end_weight_decay = args.weight_decay
        return
    if args.start_weight_decay is None or args.end_weight_decay is None:
        yield (
            f"--weight-decay-incr-style {args.weight_decay_incr_style} needs both "
            "--start-weight-decay and --end-weight-decay"
        )
    elif args.start_weight_decay > args.end_weight_decay:
        yield (
            f"--start-weight-decay {args.start_weight_decay:g} must be at most --end-weight-decay "
            f"{args.end_weight_decay:g}"
        )
