"""What the documents say, for tests that hold it against the code or a run."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_folder_entries() -> set[str]:
    """Files and folders at the top of a run folder, as docs/reference/run-folder.md lists them."""
    page = (ROOT / "docs" / "reference" / "run-folder.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    return {entry for cell in cells for entry in re.findall(r"`([^`/]+)", cell)}
