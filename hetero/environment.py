"""The environment variables of this project, to tell a name that is misspelt."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

PREFIX = "HETERO_"
_OF_TESTS = "HETERO_TEST_"
NAMES = (
    "HETERO_VENDOR",
    "HETERO_INSTEAD_OF",
    "HETERO_NICS",
    "HETERO_SLOWDOWN",
    "HETERO_HIP_LIBRARY",
    "HETERO_IBVERBS_LIBRARY",
    "HETERO_LAUNCHER_PID",
    "HETERO_OVERLAP_MEASURED",
    "HETERO_OVERLAP_PHASES",
)
_BACKENDS = ("nccl", "gloo", "mpi", "ucc", "xccl")
"""Of torch.distributed, of which HETERO_INSTEAD_OF names some."""


def unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """A sentence for every variable that nothing reads, with the nearest name of one that is."""
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in NAMES and not name.startswith(_OF_TESTS):
            yield f"{name} is no variable of this project{_hint(name, NAMES)}"
    for backend in environ.get("HETERO_INSTEAD_OF", "").split(","):
        if backend.strip() and backend.strip() not in _BACKENDS:
            yield (
                f"HETERO_INSTEAD_OF names {backend.strip()}, which is no backend of "
                f"torch.distributed{_hint(backend.strip(), _BACKENDS)}"
            )


def _hint(name: str, known: tuple[str, ...]) -> str:
    # The prefix that all have in common would make any of them look near.
    endings = {one.removeprefix(PREFIX): one for one in known}
    nearest = difflib.get_close_matches(name.removeprefix(PREFIX), endings, n=1)
    if nearest:
        return f"; did you mean {endings[nearest[0]]}?"
    return f"; there are {', '.join(known)}"
