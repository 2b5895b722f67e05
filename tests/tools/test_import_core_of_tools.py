"""What megatron-core says at import stays out of every tool's output."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.commands import ROOT, ended

IMPORTS_CORE = re.compile(
    r"^\s+from megatron\.(core|hetero\.(dataset_checks|tokenizer\.build|generation|operators))",
    re.MULTILINE,
)
FOR_TYPES = re.compile(r"^if TYPE_CHECKING:\n(?:    .*\n)+", re.MULTILINE)
TOOLS = sorted(
    path
    for folder in ("hetero/tools", "bench")
    for path in (ROOT / folder).rglob("*.py")
    if "quiet" not in path.name
)


def test_megatron_core_is_quiet_and_brings_no_compiler_for_a_cpu() -> None:
    code = (
        "from megatron.hetero.import_core import import_megatron_core; import_megatron_core()\n"
        "import megatron.hetero.dataset_checks, megatron.hetero.generation, sys, torch\n"
        "for_gpus = torch.version.cuda or torch.version.hip\n"
        "assert for_gpus or 'torch._inductor.compile_fx' not in sys.modules"
    )
    done = ended("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("path", TOOLS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_tool_tells_it_before_it_imports_it(path: Path) -> None:
    text = FOR_TYPES.sub("", path.read_text())
    first = IMPORTS_CORE.search(text)
    if first is not None:
        assert "import_megatron_core()" in text[: first.start()]
