"""How the HTML reports are rendered: escaped, and nothing left out in silence."""

from __future__ import annotations

import jinja2


def compiled(source: str) -> jinja2.Template:
    """A template whose values are escaped and in which an unknown name is an error."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(source)
