"""How a tool says that a file could not be read or written."""

from __future__ import annotations

import errno

import pytest

from tools.tool_command_line import run

FULL = (errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (OSError(*FULL, "out.bin"), "out.bin: No space"),
        (OSError(*FULL, "in.json", None, "out.json"), "in.json to out.json: No space"),
        (OSError(*FULL), "No space"),
    ],
)
def test_a_failed_write_names_every_file_that_it_is_about(error, named, capsys) -> None:
    def work() -> str:
        raise error

    assert run(work) == 2
    assert capsys.readouterr().err.startswith(f"error: {named}")
