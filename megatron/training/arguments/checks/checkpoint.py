"""The one place that says checkpoints do not exist yet; goes when they do."""

from argparse import Namespace

from hetero.errors import UserError


def refuse_checkpoints(args: Namespace) -> None:
    """A run that was told to save and would not is worse than one that does not start."""
    for name in ("save", "load", "pretrained_checkpoint"):
        if getattr(args, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"checkpoints are not available yet; remove {flag}")
