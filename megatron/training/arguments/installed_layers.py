"""Whose layers a run builds, where the ones that were asked for are not installed."""

from argparse import Namespace
from importlib.util import find_spec

ENGINE = "transformer_engine"


def engine_is_installed() -> bool:
    """Whether TransformerEngine can be found; it is not imported."""
    try:
        return find_spec(ENGINE) is not None
    except ValueError:  # imported by other means than a finder
        return True


def fall_back(args: Namespace) -> None:
    """Take megatron-core's local layers where TransformerEngine is missing, and remember it.

    Megatron-LM's own default is TransformerEngine, so every script asks for it, said or not. The
    weights are the same in number and by name; each vendor of a mixed run decides for itself.
    """
    args.lacks_transformer_engine = (
        vars(args).get("transformer_impl") == ENGINE and not engine_is_installed()
    )
    if args.lacks_transformer_engine:
        args.transformer_impl = "local"
