"""Redirects Ray's messages to a driver, such as the last log lines of a lost node, to a file in the run folder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ray._private import worker

from solrl_ray.common.output import lost_if_refused


@contextmanager
def kept_in(file: Path) -> Iterator[None]:
    """Context in which Ray's messages are appended to `file` instead of printed. The first one prints a note that names
    the file.
    """
    noted = False

    def keep(data: dict[str, Any], ignore_prefix: bool) -> None:
        nonlocal noted
        with suppress(OSError), file.open("a") as log:
            log.writelines(f"{time.strftime('%FT%T')} {line}\n" for line in data["lines"])
        if not noted:
            noted = True
            with lost_if_refused():
                print(f"note: Ray reports a fault in its cluster; its messages are in {file}", flush=True)

    # Not public: Ray has no setting for this, and prints dozens of lines, including lines from earlier runs.
    printed, worker.print_to_stdstream = worker.print_to_stdstream, keep
    try:
        yield
    finally:
        worker.print_to_stdstream = printed
