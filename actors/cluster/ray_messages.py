"""Ray's messages to a driver, such as the last log lines of a lost node, go to a file of the run folder."""

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
    """Append Ray's messages to `file` instead of printing them, in this block; a note names it at the first one."""
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
