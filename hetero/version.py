"""The project's version, and megatron-core's that it is written for."""

__version__ = "0.1.0"
"""Both sides of a boundary must run the same one."""

MEGATRON_CORE = "0.16.1"
