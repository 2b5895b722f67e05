"""Falls back to megatron-core's local layers where TransformerEngine is not installed."""

from argparse import Namespace
from importlib.util import find_spec

ENGINE = "transformer_engine"


def engine_is_installed() -> bool:
    """Whether TransformerEngine can be found; it is not imported."""
    try:
        return find_spec(ENGINE) is not None
    except ValueError:  # a module without a spec: put into sys.modules by hand
        return True


def fall_back(args: Namespace) -> None:
    """Set `transformer_impl` to local if TransformerEngine is missing, and a flag that says so.

    Refusing would refuse every script, because Megatron-LM's default is TransformerEngine. Both
    have the same weights, so each rank of a mixed run may decide for itself.
    """
    args.lacks_transformer_engine = (
        vars(args).get("transformer_impl") == ENGINE and not engine_is_installed()
    )
    if args.lacks_transformer_engine:
        args.transformer_impl = "local"
