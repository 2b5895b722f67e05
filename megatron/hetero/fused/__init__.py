"""Kernels that megatron-core leaves to apex or TransformerEngine, from torch alone.

They run wherever torch does, so both vendors of a run can use the same ones: matrix products that
add to a float32 buffer themselves, and small functions that torch.compile turns into one kernel.
docs/benchmarks/kernels.md says for each what it gains and what was tried beside it.
"""
