"""Checks of the flags of saving and loading checkpoints."""

from argparse import Namespace
from collections.abc import Iterator

from megatron.hetero.checkpoint.resume import CHECKPOINT_SCHEDULE, OVERRIDE_SCHEDULE, ResumeFlags

_SAVE_FLAGS = (
    *("save_interval", "save_retain_interval", "keep_last", "exit_on_save_failure"),
    *("async_save", "no_save_optim", "no_save_rng"),
)
_LOAD_FLAGS = (
    *("ckpt_step", "finetune", "exit_on_missing_checkpoint", "no_load_optim", "no_load_rng"),
    *("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"),
)

_SPELLED = {
    "override_opt_param_scheduler": OVERRIDE_SCHEDULE,
    "use_checkpoint_opt_param_scheduler": CHECKPOINT_SCHEDULE,
}


def check_checkpoints(args: Namespace) -> Iterator[str]:
    """Refuse contradictions, and note flags that have no effect without --save or --load."""
    loads = args.load is not None or args.pretrained_checkpoint is not None
    for names, is_given, flag in (
        (_SAVE_FLAGS, args.save is not None, "--save"),
        (_LOAD_FLAGS, loads, "--load"),
    ):
        for name in names:
            if getattr(args, name) and not is_given:
                spelled = _SPELLED.get(name, f"--{name.replace('_', '-')}")
                args.ignored_flags.append(f"{spelled}: it needs {flag}")
    yield from ResumeFlags.of(args).contradictions()
    if args.skip_train:
        # As in Megatron: nothing is updated, so neither state nor schedule has to fit.
        args.no_load_optim = True
    if args.exit_signal != "SIGTERM" and not args.exit_signal_handler:
        args.ignored_flags.append("--exit-signal: it needs --exit-signal-handler")
    interval, retained = args.save_interval, args.save_retain_interval
    if interval and retained and retained % interval:
        yield (
            f"--save-retain-interval {retained} must be a multiple of --save-interval {interval}"
        )
