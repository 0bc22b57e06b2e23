"""The pages of docs/reference and the pictures of docs/concepts are what the code makes of them."""

from __future__ import annotations

from collections.abc import Iterator

import drawings
import pytest
from pydantic import BaseModel
from reference_pages import FOLDER, PAGES, sections, shown, subcommands

from solrl_ray import cli
from solrl_ray.config.schema import Config


@pytest.mark.parametrize("file", PAGES)
def test_a_page_is_what_the_code_makes_of_it(file: str) -> None:
    assert PAGES[file]() == (FOLDER / file).read_text(encoding="utf-8"), "run `make reference`"


@pytest.mark.parametrize("name", drawings.PICTURES)
def test_a_picture_is_what_its_description_makes_of_it(name: str) -> None:
    drawn = drawings.svg(drawings.PICTURES[name])
    assert drawn == (drawings.FOLDER / f"{name}.svg").read_text(encoding="utf-8"), "run `make reference`"


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
