"""What the documents name exists: files, tests, links, pictures, options of commands and configuration keys."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from solrl_ray import cli
from solrl_ray.config import removed
from solrl_ray.config.schema import Config

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *(ROOT / name / "README.md" for name in ("benchmarks", "examples")),
    ]
)
SOURCES = ("solrl_ray", "actors", "tests", "benchmarks", "configs", "deploy", "docs", "examples")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"^([\w.*-]+/)*[\w.*-]+\.(py|yaml|md|toml|yml|sbatch)(::[\w…]+)?$")
KEY = re.compile(r"^[a-z_]+(\.[a-z_*0-9]+)+$")
FORMATS = (".py", ".yaml", ".json", ".txt", ".html")
SCRIPT = re.compile(r"python (?:-m )?((?:benchmarks|examples|tests|solrl_ray)[\w./]*)([^\n`]*)")
TARGET = re.compile(r"(?:^|`|\| )make ([a-z-]+)", re.MULTILINE)
HISTORY = ROOT / "CHANGELOG.md"
"""It names files and scripts as they were."""
GONE = re.compile(r"`([\w./]+\.py)`\s+at\s+([0-9a-f]{8})\b")
"""A file that was removed, and a commit that has it."""
OURS = re.compile(r"^(?:solrl|python -m solrl_ray) ", re.MULTILINE)


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def quoted(page: Path) -> set[str]:
    """What stands between single backticks."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return {" ".join(text.split()) for text in re.findall(r"`([^`]+)`", prose)}


@cache
def sources() -> tuple[str, ...]:
    """Paths of all files that are named in documents, from the root."""
    found = [path for folder in SOURCES for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    return tuple(str(path.relative_to(ROOT)) for path in [*found, *ROOT.glob("*")])


def exists(name: str) -> bool:
    """A file by the end of its path, ``*`` for anything; with ``::`` also a test in it, ``…`` for what is left out."""
    path, _, test = name.partition("::")
    pattern = re.compile(rf"(^|.*/){re.escape(path).replace(chr(92) + '*', '.*')}$")
    there = [source for source in sources() if pattern.match(source)]
    if not test:
        return bool(there)
    wanted = re.compile(rf"^def {re.escape(test).replace('…', chr(92) + 'w*')}[(]", re.MULTILINE)
    return any(wanted.search((ROOT / source).read_text()) for source in there)


ELSEWHERE = {"config.yaml", "cluster.yaml", "my.yaml", "utils.py"}
"""Of a run folder, of users, and what there shall not be."""


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_and_files_are_there(page: Path) -> None:
    links = [link.partition("#")[0] for link in LINK.findall(page.read_text()) if "://" not in link]
    assert [link for link in links if link and not (page.parent / link).exists()] == []
    if page == HISTORY:
        return
    gone = {file for file, _ in GONE.findall(page.read_text())}
    named = {text for text in quoted(page) if FILE.match(text)} - ELSEWHERE - gone
    assert sorted(text for text in named if not exists(text)) == []


def test_a_file_that_was_removed_is_in_the_commit_that_a_page_names() -> None:
    named = {pair for page in PAGES for pair in GONE.findall(page.read_text())}
    known = {commit: _is_object(f"{commit}^{{commit}}") for _, commit in named}
    if not all(known.values()):
        pytest.skip("this copy has no git history that goes back so far")
    assert named
    assert sorted(file for file, commit in named if not _is_object(f"{commit}:{file}")) == []


def _is_object(name: str) -> bool:
    """Whether git has it."""
    return subprocess.run(["git", "cat-file", "-e", name], cwd=ROOT, capture_output=True).returncode == 0


@cache
def options() -> dict[str, set[str]]:
    """Command of `solrl` → its options."""

    def actions_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
        for action in parser._actions:
            yield action
            for chosen in (action.choices or {}).values() if isinstance(action.choices, dict) else ():
                yield from actions_of(chosen)

    (commands,) = [a for a in cli.parser()._actions if isinstance(a.choices, dict)]
    assert isinstance(commands.choices, dict)
    return {
        name: {option for action in actions_of(parser) for option in action.option_strings}
        for name, parser in commands.choices.items()
    }


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_have_the_options_that_are_shown(page: Path) -> None:
    text = page.read_text().replace("\\\n", " ")
    shown = [text[match.end() :].partition("\n")[0] for match in OURS.finditer(text)]
    shown += [entry.removeprefix("solrl ") for entry in quoted(page) if entry.startswith("solrl ")]
    for command in shown:
        words = shlex.split(command, comments=True)
        verb = words[0].rstrip("…") if words else ""
        if verb and not (page.name == "CHANGELOG.md" and verb in removed.COMMANDS):
            assert verb in options(), command
            used = {word.strip("[]").partition("=")[0] for word in words if word.strip("[]").startswith("--")}
            assert used <= options()[verb] | (set(removed.OPTIONS) if page == HISTORY else set()), command


def models_of(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a key's type allows."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_of(part)]


def is_key(key: str) -> bool:
    """Whether a configuration may have it; ``*`` stands for any name, numbers for list entries."""
    annotations: list[Any] = [Config]
    for name in key.split("."):
        if not name.isdecimal():
            fields = [field for a in annotations for s in models_of(a) for field in keys_of(s).items()]
            annotations = [annotation for known, annotation in fields if name in (known, "*")]
    return bool(annotations)


def keys_of(section: type[BaseModel]) -> dict[str, Any]:
    """Keys of a section and their types, those included whose value is fixed."""
    fixed = {name: type(getattr(section, name)) for name in section.__class_vars__ if hasattr(section, name)}
    return {name: field.annotation for name, field in section.model_fields.items()} | fixed


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_configuration_keys_are_keys(page: Path) -> None:
    named = {text.partition("=")[0].partition(":")[0] for text in quoted(page)}
    keys = {text for text in named if KEY.match(text) and text.partition(".")[0] in Config.model_fields}
    gone = set(removed.KEYS) if page == HISTORY else set()
    assert sorted(key for key in keys - gone if not is_key(key) and not key.endswith(FORMATS)) == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_scripts_have_the_options_that_are_shown_and_the_makefile_its_targets(page: Path) -> None:
    text = page.read_text().replace("\\\n", " ")
    for script, rest in SCRIPT.findall(text):
        if page == HISTORY:
            break
        file = ROOT / (script if script.endswith(".py") else script.replace(".", "/") + ".py")
        if script != "solrl_ray" and "(in commit " not in rest:  # else the script was removed
            imported = re.findall(r"^(?:from|import) ([\w.]+)", file.read_text(), re.MULTILINE)  # some have options
            shared = [ROOT / "benchmarks" / f"{name.replace('.', '/')}.py" for name in imported]
            source = "".join(each.read_text() for each in (file, *shared) if each.is_file())
            used = set(re.findall(r"--[a-z][a-z-]*", rest.partition("#")[0]))
            assert {option for option in used if f'"{option}"' not in source} == set(), script
    targets = re.findall(r"^([a-z-]+(?: [a-z-]+)*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(TARGET.findall(text)) <= {name for line in targets for name in line.split()}


def test_every_page_and_every_picture_is_linked_from_another_page() -> None:
    linked = {
        target
        for page in PAGES
        for link in LINK.findall(page.read_text())
        if (target := (page.parent / link.partition("#")[0]).resolve()) != page
    }
    wanted = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/images/*")]
    assert [page_id(page) for page in wanted if page not in linked] == []


def test_every_package_is_on_the_page_of_source_files() -> None:
    listed = quoted(ROOT / "docs" / "reference" / "files.md")
    packages = [path for top in ("actors", "solrl_ray") for path in (ROOT / top).iterdir() if any(path.glob("*.py"))]
    assert [page_id(package) for package in packages if f"{page_id(package)}/" not in listed] == []


def test_every_row_of_the_failure_table_names_the_test_that_proves_it() -> None:
    page = (ROOT / "docs" / "reference" / "failures.md").read_text()
    tables = re.findall(r"^\|.*\| test \|\n\|[-|]+\|\n((?:\|.*\n)+)", page, re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) > 50
    named = [re.findall(r"`([\w/.]+)::([\w…]+)`", row.rsplit(" | ", 1)[1]) for row in rows]
    assert [row for row, of in zip(rows, named, strict=True) if not of] == []
    pairs = {pair for of in named for pair in of}
    assert [f"{file}::{name}" for file, name in sorted(pairs) if not _has_test(file, name)] == []


def _has_test(file: str, name: str) -> bool:
    """Whether a file of tests has such a function; `…` stands for any part of its name."""
    pattern = name.replace("…", r"\w*")
    return bool(re.search(rf"^(?:async )?def {pattern}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE))
