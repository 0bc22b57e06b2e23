"""The commands of the README and the guides, as a newcomer types them, page by page in a folder of one's own.

A block of code with a title is a file of that folder. Commands that only plan, list or import are run as they are.
Those that would train are planned instead: a plan reads the same configuration and says what this machine lacks as a
note. The demo lacks nothing: with a reward of the page it is run with ``--dry-run``, which tries the reward. A command
with a placeholder in capitals, or with …, is for the reader to complete.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import edits
import pytest

from tests.support.command_line import solrl

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/start/*.md"))]
PAGES += [*sorted(ROOT.glob("docs/guides/*.md"))]
BLOCK = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```", re.DOTALL | re.MULTILINE)
PLACEHOLDER = re.compile(r"\b[A-Z]{3,}\b|…|\$")
AS_THEY_ARE = {"plan", "list", "config", "prompts"}
PLANNED = {"train"}
FLAGS = {"--dry-run", "--no-live", "--continue"}


def files(page: Path) -> dict[str, str]:
    """Name → content of the files that a page shows."""
    return {name: content for _, name, content in BLOCK.findall(page.read_text()) if name}


def commands(page: Path) -> list[list[str]]:
    """What a page has a reader type of `solrl`, in order, without comments."""
    text = "\n".join(content for language, _, content in BLOCK.findall(page.read_text()) if not language)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.startswith("solrl ")]
    shown = [line for line in lines if not PLACEHOLDER.search(line.partition("#")[0])]
    return [shlex.split(line, comments=True)[1:] for line in shown]


def planned(words: list[str]) -> list[str] | None:
    """What stands for a command that trains; None for one that begins with another run or goes on with it."""
    kept, rest = [], iter(words[1:])
    for word in rest:
        if word in ("--resume", "--from"):
            return None
        if word == "--address":
            next(rest)
        elif word not in FLAGS:
            kept.append(word)
    own_reward = any(word.startswith("rewards=") for word in kept)
    return ["train", *kept, "--dry-run"] if kept[0] == "demo" and own_reward else ["plan", *kept]


def runnable(page: Path) -> list[list[str]]:
    found = []
    for words in commands(page):
        run = words if words[0] in AS_THEY_ARE else planned(words) if words[0] in PLANNED else None
        if run is not None and run not in found:
            found.append(run)
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a reader has: captions, prompts, and a clone's examples and configurations."""
    captions = [f"a picture of number {number}" for number in range(400)]
    (tmp_path / "captions.csv").write_text("caption,source\n" + "".join(f"{caption},me\n" for caption in captions))
    (tmp_path / "captions.txt").write_text("\n".join(captions))
    (tmp_path / "drawbench.csv").write_text("Prompts,Category\n" + "".join(f"{caption},x\n" for caption in captions))
    (tmp_path / "pickscore").mkdir()
    (tmp_path / "pickscore" / "train.txt").write_text("\n".join(captions[64:]))
    (tmp_path / "pickscore" / "test.txt").write_text("\n".join(captions[:64]))
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "train.jsonl").write_text("".join(f'{{"text": "{c}"}}\n' for c in captions[64:]))
    (tmp_path / "prompts" / "heldout.jsonl").write_text("".join(f'{{"text": "{c}"}}\n' for c in captions[:64]))
    for name in ("examples", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", [p for p in PAGES if runnable(p)], ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_work_in_their_order(
    page: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in files(page).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    if "examples/editing/edits.py" in page.read_text():
        edits.write_all(folder / "edits", steps=0)
    for words in runnable(page):
        if words[:2] == ["prompts", "import"] and "--force" not in words:
            words = [*words, "--force"]  # the folder has prompts already
        command, _, target = " ".join(words).partition(" > ")
        status = solrl(*words[: len(words) - 2] if target else words)
        said = capsys.readouterr()
        assert status == 0, f"solrl {command}: {said.err}"
        if target:
            (folder / target).write_text(said.out)
