"""The list of rooms in the documents is that of the tree, and the files that are looked for most are named."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "concepts" / "architecture.md").read_text()
QUESTIONS = 22


def section(title: str) -> str:
    """Of the page, from a heading to the next one."""
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rooms(top: str) -> set[str]:
    """Folders and modules of a package, as the page writes them."""
    folders = {f"{top}/{path.name}/" for path in (ROOT / top).iterdir() if any(path.glob("*.py"))}
    modules = {f"{top}/{path.name}" for path in (ROOT / top).glob("*.py") if not path.name.startswith("__")}
    return folders | modules


def test_every_room_is_listed_and_every_listed_room_is_there() -> None:
    listed = set(re.findall(r"`((?:actors|solrl_ray)/[\w./]+)`", section("Rooms")))
    assert listed == rooms("actors") | rooms("solrl_ray")


def test_where_to_find_what_names_files_that_are_there() -> None:
    rows = [line for line in section("Where to find what").splitlines() if line.startswith("| ")][1:]
    assert len(rows) == QUESTIONS
    for row in rows:
        files = re.findall(r"`([\w/]+\.py)`", row)
        assert files, row
        assert all((ROOT / file).is_file() for file in files), row
