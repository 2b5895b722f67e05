"""The host and its software, on the machine that runs the tests."""

from __future__ import annotations

import resource

import pytest
import torch

from hetero.tools.preflight_checks.host_facts import read_limits
from hetero.tools.preflight_checks.pci import redirects_peers
from hetero.tools.preflight_checks.roots import Roots, run_tool
from hetero.tools.preflight_checks.software import (
    own_requirements,
    read_software,
    unmet_requirements,
)
from tests.tools.preflight_checks.machines import config_space


def test_limits_are_those_of_this_process(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        assert read_limits().open_files == soft - 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert read_limits(str(tmp_path / "missing")).shared_memory == 0


def test_the_running_software_is_told():
    software = read_software()
    assert f"{software.torch}+{software.torch_build}".startswith(torch.__version__.split("+")[0])
    assert software.unmet == unmet_requirements(own_requirements())


def test_unmet_requirements_say_what_is_there_instead():
    lines = (
        *("# a comment", "-c other.txt", "", "psutil>=1", "psutil<1  # too new"),
        *("no-such-package-at-all>=2", "no-such-package-either; python_version < '3'"),
        "nor-this; extra == 'dev'",
    )
    old, missing = unmet_requirements(lines)
    assert old.startswith("psutil<1 is wanted and ")
    assert missing == "no-such-package-at-all>=2 is not installed"


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        *((config_space(control), False) for control in (0x00, 0x01)),
        *((config_space(control), True) for control in (0x04, 0x1D)),
        (bytes(4096), False),  # without access control
    ],
)
def test_a_port_redirects_when_requests_or_completions_are(tmp_path, space, expected):
    file = tmp_path / "sys/bus/pci/devices/0000:17:00.0/config"
    file.parent.mkdir(parents=True)
    file.write_bytes(space)
    assert redirects_peers(Roots.below(tmp_path), "0000:17:00.0") is expected


def test_a_vendors_program_may_be_absent_or_fail():
    assert run_tool(["no-such-program"]) == ""
    assert run_tool(["false"]) == ""
    assert run_tool(["echo", "570.124.06"]) == "570.124.06\n"
