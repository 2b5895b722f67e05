"""The plan: which vendor, which ranks and which layers make up each pipeline stage.

Pure data. Nothing in this package imports torch, so a plan can be read, checked and printed
anywhere. `hetero check-plan FILE --world-size N` does so from a shell.
"""

from hetero.plan.file import load_plan
from hetero.plan.plan import (
    VENDOR_VARIABLE,
    VENDORS,
    Block,
    Coordinate,
    Edge,
    Mesh,
    Plan,
    split_over_chunks,
)

__all__ = [
    "VENDORS",
    "VENDOR_VARIABLE",
    "Block",
    "Coordinate",
    "Edge",
    "Mesh",
    "Plan",
    "load_plan",
    "split_over_chunks",
]
