"""A help formatter that shows defaults only where they tell something."""

from __future__ import annotations

import argparse


class HelpFormatter(argparse.HelpFormatter):
    """Adds `(default: 64)` to the help of a flag that has such a value.

    Nothing is added for a switch, or a default of None or an empty list. If leaving out such a flag
    means something, its own help says so.
    """

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if not action.help or action.required or default in (None, argparse.SUPPRESS, "", []):
            return action.help
        if isinstance(default, bool) or not action.option_strings:
            return action.help
        shown = " ".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
        return f"{action.help} (default: {shown.replace('%', '%%')})"
