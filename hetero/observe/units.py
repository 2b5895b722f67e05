"""Numbers as people read them."""


def size_text(count: float) -> str:
    """Bytes in the largest binary unit that leaves a number of at least one."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
