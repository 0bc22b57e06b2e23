"""What a repository's host and package indexes read: issue forms, the citation, the package's metadata."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import solrl_ray

ROOT = Path(__file__).parents[3]
FORMS = sorted(path for path in ROOT.glob(".github/ISSUE_TEMPLATE/*.yml") if path.name != "config.yml")
ATTRIBUTES = {
    "markdown": {"value"},
    "input": {"label", "description", "placeholder", "value"},
    "textarea": {"label", "description", "placeholder", "value", "render"},
    "dropdown": {"label", "description", "options", "multiple", "default"},
}
"""Kinds of fields → what each may have; a form with anything else is not shown by its host, which says nothing."""


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_has_what_its_host_knows(path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= content.keys() <= {"name", "description", "title", "labels", "body"}
    for field in content["body"]:
        assert field.keys() <= {"type", "id", "attributes", "validations"}
        attributes = field["attributes"]
        assert attributes.keys() <= ATTRIBUTES[field["type"]]
        assert attributes.get("value" if field["type"] == "markdown" else "label")
        assert all(isinstance(option, str) for option in attributes.get("options", []))  # a bare yes would be true
    ids = [field["id"] for field in content["body"] if field["type"] != "markdown"]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]+", name) for name in ids)


def test_version_authors_and_licence_are_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    package: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" in package["dynamic"]
    assert citation["version"] == solrl_ray.__version__
    assert citation["license"] == package["license"]
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in package["authors"]]


def test_the_newest_version_is_in_the_changelog() -> None:
    versions = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[:2] == ["Unreleased", solrl_ray.__version__]


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-gpu.lock"])
def test_a_lock_has_hashes_of_every_package(lock: str) -> None:
    """What is installed is refused if it has another one; a package without any is not looked at."""
    lines = re.sub(r" \\\n\s*", " ", (ROOT / lock).read_text()).splitlines()
    packages = [line for line in lines if line and not line.startswith("#")]
    assert len(packages) > 100
    hashed = re.compile(r"\S+==\S+( ; .+?)?( --hash=sha256:[0-9a-f]{64})+")
    assert [each for each in packages if not hashed.fullmatch(each)] == []
