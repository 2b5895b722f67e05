"""Megatron-LM's command line: flags, defaults and checks, ready before torch is imported."""

from megatron.training.arguments.parser import build_parser, parse_args
from megatron.training.arguments.validate import finish_validation

__all__ = ["build_parser", "finish_validation", "parse_args"]
