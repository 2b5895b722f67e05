"""Megatron-LM's command line: flags, defaults and checks, ready before torch is imported."""

from megatron.hetero.arguments.parser import build_parser, parse_args

__all__ = ["build_parser", "parse_args"]
