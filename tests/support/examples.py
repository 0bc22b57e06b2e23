"""The examples as users start them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
REWARD_SERVER = EXAMPLES / "reward_server" / "server.py"
JUDGE = EXAMPLES / "judge" / "stand_in.py"
PAIRWISE = EXAMPLES / "pairwise" / "preferred.py"


@contextmanager
def listening(script: Path, **variables: str) -> Iterator[int]:
    """The port of a server that is a script with the port as its argument, which it prints when it listens."""
    with subprocess.Popen(
        [sys.executable, script, "0"],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        try:
            assert server.stdout
            yield int(server.stdout.readline())
        finally:
            server.terminate()
