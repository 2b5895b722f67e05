"""The plan: which vendor, which ranks and which layers make up each pipeline stage.

Pure data. Nothing in this package imports torch, so a plan can be read, checked and printed
anywhere. `hetero check-plan FILE --world-size N` does so from a shell.
"""

from hetero.plan.mesh import VENDORS, Mesh
from hetero.plan.plan import Block, Coordinate, Edge, Plan, split_over_chunks
from hetero.plan.plan_file import load_plan

__all__ = [
    "VENDORS",
    "Block",
    "Coordinate",
    "Edge",
    "Mesh",
    "Plan",
    "load_plan",
    "split_over_chunks",
]
