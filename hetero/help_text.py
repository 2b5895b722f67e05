"""How --help shows a flag's default: only where that tells a reader something."""

from __future__ import annotations

import argparse


class HelpFormatter(argparse.HelpFormatter):
    """Adds `(default: 64)` to the help of a flag that has such a value.

    Nothing is added for a flag that is off, or has no value, until it is given: a switch, None, an
    empty list. Where leaving such a flag out means something, its own help says what.
    """

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if not action.help or action.required or default in (None, argparse.SUPPRESS, "", []):
            return action.help
        if isinstance(default, bool) or not action.option_strings:
            return action.help
        shown = " ".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
        return f"{action.help} (default: {shown.replace('%', '%%')})"
