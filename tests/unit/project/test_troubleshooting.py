"""docs/start/troubleshooting.md: what it says that a user sees is what the program says."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "start" / "troubleshooting.md").read_text()
SENTENCES = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)


@cache
def said() -> tuple[str, ...]:
    """All texts of the code, with … for what is put into them."""
    found: list[str] = []
    for path in [*ROOT.glob("solrl_ray/**/*.py"), *ROOT.glob("actors/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values))  # type: ignore[misc]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


def is_said(sentence: str) -> bool:
    """Whether a text of the code has the words of `sentence` in their order, with anything for each …"""
    parts = [re.escape(part) for part in sentence.strip("…").split("…")]
    pattern = re.compile(".*?".join(parts), re.DOTALL)
    return any(pattern.search(text) for text in said() if len(text) < 1000)


def test_there_are_sentences_for_each_part_of_a_run() -> None:
    assert len(SENTENCES) > 25
    assert not is_said("run.name is …, and … holds a run already")


@pytest.mark.parametrize("sentence", SENTENCES)
def test_a_sentence_of_the_page_is_one_of_the_program(sentence: str) -> None:
    # Keys are put into some sentences, so that the code has … for them.
    alternatives = {sentence, re.sub(r"^[a-z]+(\.[a-z]+)+ is", "… is", sentence)}
    assert any(is_said(each) for each in alternatives)
