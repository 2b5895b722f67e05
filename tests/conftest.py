"""What tests of any part share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import preloaded


@pytest.fixture(scope="module")
def preloaded_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The processes of every launcher that a module starts begin with torch imported."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in preloaded.as_interpreter(tmp_path_factory.mktemp("python")).items():
            patch.setenv(name, value)
        yield
