"""The project's version: both sides of a boundary must run the same one."""

__version__ = "0.1.0"
