"""The pages of docs/reference and the pictures of docs/concepts are what the code makes of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import drawings
import pytest
from pydantic import BaseModel
from reference_pages import FOLDER, PAGES, sections, shown, subcommands

from solrl_ray import cli
from solrl_ray.config.schema import Config
from tests.support.documents import ROOT, run_folder_entries


@pytest.mark.parametrize("file", PAGES)
def test_a_page_is_what_the_code_makes_of_it(file: str) -> None:
    assert PAGES[file]() == (FOLDER / file).read_text(encoding="utf-8"), "run `make reference`"


@pytest.mark.parametrize("name", drawings.PICTURES)
def test_a_picture_is_what_its_description_makes_of_it(name: str) -> None:
    drawn = drawings.svg(drawings.PICTURES[name])
    assert drawn == (drawings.FOLDER / f"{name}.svg").read_text(encoding="utf-8"), "run `make reference`"


@pytest.mark.parametrize("name", drawings.PICTURES)
def test_the_parts_of_a_picture_are_inside_of_it_and_its_lines_inside_their_boxes(name: str) -> None:
    picture = drawings.PICTURES[name]
    for box in (part for part in picture.parts if isinstance(part, drawings.Box)):
        assert 0 <= box.x < box.x + box.width <= drawings.WIDTH, box.head
        assert 0 <= box.y < box.y + box.height <= picture.height, box.head
        # A letter of 13 px is about 7 px wide in the widest of the fonts.
        assert max(map(len, box.lines)) * 7 <= box.width, box.head
        assert 18 * (1 + len(box.lines)) <= box.height, box.head


def test_the_page_of_the_run_folder_names_what_the_code_writes() -> None:
    written = {
        node.value.partition("/")[0]
        for file in (*ROOT.glob("solrl_ray/**/*.py"), *ROOT.glob("actors/**/*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert sorted(run_folder_entries() - written) == []


def fields(section: type[BaseModel] = Config) -> Iterator[tuple[str, str, bool]]:
    """Name, meaning and whether it is a section, of all keys."""
    for name, info in section.model_fields.items():
        inner = sections(info.annotation)
        yield name, info.description or "", bool(inner)
        for each in inner:
            yield from fields(each)


def test_every_key_says_what_it_means() -> None:
    assert {name for name, meaning, inner in fields() if not (meaning or inner)} == {"kind"}  # whose class says it


def test_every_argument_says_what_it_means() -> None:
    for name, said, command in subcommands(cli.parser()):
        parsers = [parser for *_, parser in subcommands(command)] or [command]
        assert said, name
        assert [a.dest for parser in parsers for a in shown(parser) if not a.help] == [], name
