"""Everything heterogeneous: the plan, the groups, the channel and the pipeline over it."""

from hetero.version import __version__

__all__ = ["__version__"]
