"""The forwarder as the install builds it and Python loads it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hetero.errors import LinkError
from hetero.transport.verbs.native import structures
from hetero.transport.verbs.native.library import FOLDER, load
from tests.c_layout import layout_in_c, layout_in_python
from tests.hip_on_cuda.library import COMPILER
from tests.loopback_nic.library import LoopbackNics

STRUCTURES = {
    "struct engine_layout": structures.Layout,
    "struct rail_request": structures.RailRequest,
    "struct rail_ending": structures.RailEnding,
    "struct rail_route": structures.RailRoute,
    "struct rail_peer": structures.RailPeer,
}


def test_a_library_that_cannot_be_loaded_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    nothing = tmp_path / "_forwarder.so"
    nothing.write_bytes(b"no library")
    with pytest.raises(LinkError, match=r"cannot be loaded .*; install libibverbs .* again"):
        load(nothing)


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_a_library_of_another_version_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    source, built = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text("int forwarder_version(void) { return 7; }")
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-o", built, source], check=True)
    with pytest.raises(LinkError, match="version 7 and 1 is needed; install this project again"):
        load(built)


def test_python_s_structures_are_laid_out_as_c_s(nics: LoopbackNics, tmp_path: Path) -> None:
    """Field by field: the two are written down apart from each other."""
    found = layout_in_c(STRUCTURES, header=FOLDER / "engine.h", folder=tmp_path)
    assert found == layout_in_python(STRUCTURES)
