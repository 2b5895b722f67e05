"""Numbers and counted things, as people read them."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 rank`, `2 ranks`; `plural` where it is not the noun and an s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def size_text(count: float) -> str:
    """Bytes in the largest binary unit that leaves a number of at least one."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
