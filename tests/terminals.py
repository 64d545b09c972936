"""Real runs on a terminal of the tests' own."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path


def on_a_terminal(*arguments: str | Path, columns: int = 80, **environment: str) -> tuple[int, str]:
    """The exit code of one run of llmcli, and all that it sends to a terminal of so many columns, from both streams."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    unset = {"NO_COLOR", "COLUMNS", "FORCE_COLOR"}
    plain = {key: value for key, value in os.environ.items() if key not in unset}
    process = subprocess.Popen(
        [sys.executable, "-m", "llmcli", *map(str, arguments)],
        stdout=theirs,
        stderr=theirs,
        env={**plain, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **environment},
    )
    os.close(theirs)
    out = b""
    while True:
        try:
            out += os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    return process.wait(60), out.decode()
