"""Programs that a test runs in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def output_of(*command: str | Path, status: int = 0, cwd: Path | None = None, **variables: str) -> str:
    """What a command prints, which ends with this status: a failure's is what it prints as its error.

    Args:
        variables: of the environment, beside those of this process.
    """
    words = list(map(str, command))
    done = subprocess.run(words, cwd=cwd, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stderr if status else done.stdout


def python(*arguments: str | Path, status: int = 0, cwd: Path | None = None, **variables: str) -> str:
    """The same, of this Python."""
    return output_of(sys.executable, *arguments, status=status, cwd=cwd, **variables)
