"""The project's version, its protocol's, and megatron-core's that it is written for."""

__version__ = "0.1.0"
"""Both sides of a boundary must run the same one."""

PROTOCOL_VERSION = 5
"""Of what ranks send each other over links (docs/wire.md). Increment it with every change."""

MEGATRON_CORE = "0.16.1"
