"""Plans: drawn ones, a mixed one and one of whole replicas."""

from dataclasses import replace

from hypothesis import strategies as st

from hetero.plan import (
    VENDORS,
    Mesh,
    Plan,
)
from hetero.plan.plan import ATTENTION_BACKENDS, RECOMPUTE

sizes = st.integers(1, 3)
choices = {"recompute": RECOMPUTE, "attention_backend": ATTENTION_BACKENDS}
options = {name: st.none() | st.sampled_from(values) for name, values in choices.items()}
options |= dict.fromkeys(("sequence_parallel", "distributed_optimizer"), st.none() | st.booleans())
meshes = st.builds(
    Mesh,
    vendor=st.sampled_from(VENDORS),
    stages=sizes,
    tensor=sizes,
    context=sizes,
    data=sizes,
    **options,
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan: its meshes need not have one shape, and chunks may be empty."""
    listed = draw(st.lists(meshes, min_size=1, max_size=3))
    if draw(st.booleans()):
        listed = [replace(mesh, micro_batch_size=6 // mesh.data) for mesh in listed]
    chunks = draw(sizes)
    stage = st.lists(st.integers(0, 4), min_size=chunks, max_size=chunks).filter(any)
    layers = [tuple(draw(stage)) for _ in range(sum(mesh.stages for mesh in listed))]
    return Plan(meshes=tuple(listed), layers=tuple(layers))


MIXED = Plan(
    meshes=(Mesh("amd", stages=1, tensor=2), Mesh("nvidia", stages=2, tensor=2)),
    layers=((3, 1), (2, 2), (1, 3)),
)


REPLICAS = Plan(
    meshes=(
        Mesh("nvidia", stages=2, tensor=2, data=2, share=3),
        Mesh("amd", stages=2, tensor=2, share=1),
    ),
    layers=((3,), (1,)),
    whole_replicas=True,
)
