"""Ctrl-C while processes are started: they do not answer it, and the starter answers afterwards."""

from __future__ import annotations

import pytest

from tests.commands import ended

STARTER = """
import os, signal, subprocess, sys, threading, time
from hetero.tools.launching.interrupts import children_ignore_interrupts

signal.signal(signal.SIGINT, signal.default_int_handler)
if sys.argv[1] == "threads":
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
try:
    with children_ignore_interrupts():
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        os.kill(child.pid, signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        print("block ended", flush=True)
    print("not interrupted")
except KeyboardInterrupt:
    print("interrupted")
child.communicate(b"\\n")
print("child", child.returncode)
"""


@pytest.mark.parametrize("beside", ["alone", "threads"])
def test_an_interrupt_waits_for_the_block_and_spares_the_children(beside: str) -> None:
    ran = ended("-c", STARTER, beside)
    assert ran.stdout.split("\n") == ["block ended", "interrupted", "child 0", ""], ran.stderr
