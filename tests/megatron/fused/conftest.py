"""The compiler of these tests: a GPU's own where there is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def _traced_and_not_built_for_a_cpu() -> Iterator[None]:
    """No run on a CPU uses these kernels, and a C++ compiler takes ten seconds for one.

    What is traced and differentiated is the same.
    """
    if torch.cuda.is_available():
        yield
        return
    with torch.compiler.set_stance(force_backend="aot_eager"):
        yield
