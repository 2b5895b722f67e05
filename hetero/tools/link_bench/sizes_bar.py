"""How far a benchmark has come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron.hetero.console import progress_bar


@contextmanager
def sizes_bar(count: int, *, shown: bool) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal, nothing elsewhere; call what it gives as each size begins."""
    with progress_bar(total=count, shown=shown, unit="size", leave=False) as bar:
        begun = 0

        def begin(text: str) -> None:
            nonlocal begun
            bar.update(min(begun, 1))
            bar.set_description(text)
            begun += 1

        yield begin
