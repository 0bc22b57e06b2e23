"""What Ray prints in a driver, such as the last log lines of a lost node, is kept in a file of the run folder."""

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
    """In this block, Ray's messages are appended to `file`; the first one makes a note that names it."""
    noted = False

    def keep(data: dict[str, Any], ignore_prefix: bool) -> None:
        nonlocal noted
        with suppress(OSError), file.open("a") as log:
            log.writelines(f"{time.strftime('%FT%T')} {line}\n" for line in data["lines"])
        if not noted:
            noted = True
            with lost_if_refused():
                print(f"note: Ray reports a fault in its cluster; its messages are in {file}", flush=True)

    # Not public: Ray has no setting for it, and prints dozens of lines, also of earlier runs.
    printed, worker.print_to_stdstream = worker.print_to_stdstream, keep
    try:
        yield
    finally:
        worker.print_to_stdstream = printed
