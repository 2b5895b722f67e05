"""A program with a real terminal as its stdout, its stderr or both, and what it showed there."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Shown:
    """What a program wrote to files, and to the terminal; empty where it had none."""

    code: int
    stdout: str
    stderr: str
    screen: str


def run(
    command: Sequence[str],
    folder: Path,
    *,
    on_terminal: Sequence[str],
    size: tuple[int, int] = (24, 80),
    environ: Mapping[str, str] | None = None,
    seconds: float = 120,
) -> Shown:
    """Run to the end; `on_terminal` names those of stdout and stderr that are the terminal.

    `size` is its rows and columns; `docker -t` and `ssh -t` may give none: (0, 0).
    """
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    screen: list[bytes] = []
    reader = threading.Thread(target=_read, args=(controller, screen), daemon=True)
    reader.start()
    files = {name: (folder / name).open("w+") for name in ("stdout", "stderr")}
    streams = {n: terminal if n in on_terminal else file.fileno() for n, file in files.items()}
    process = subprocess.Popen(command, env={**os.environ, **(environ or {})}, **streams)
    try:
        code = process.wait(seconds)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        # The reader's end comes once nobody has the terminal open.
        os.close(terminal)
        reader.join(60)
        os.close(controller)
        texts = {}
        for name, file in files.items():
            file.seek(0)
            texts[name] = file.read()
            file.close()
    return Shown(code, texts["stdout"], texts["stderr"], b"".join(screen).decode())


def _read(controller: int, screen: list[bytes]) -> None:
    while True:
        try:
            part = os.read(controller, 65536)
        except OSError:  # nobody has the other end open any more
            return
        if not part:
            return
        screen.append(part)
