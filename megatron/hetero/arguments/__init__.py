"""Megatron-LM's command line: flags, defaults and rules, ready before torch is imported."""

from megatron.hetero.arguments.parser import (
    Configuration,
    build_parser,
    parse_args,
    read_command_line,
)

__all__ = ["Configuration", "build_parser", "parse_args", "read_command_line"]
