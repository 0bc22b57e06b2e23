"""YAML as it is read and written: the scalars of YAML 1.2, and no key twice."""

from __future__ import annotations

from typing import Any

import pytest

from solrl_ray.config import yaml_text
from solrl_ray.errors import UserError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 0.0003),
        ("1e-4", 0.0001),
        ("-2.5E+3", -2500.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("017", 17),
        ("0o17", 15),
        ("0x1F", 31),
        ("no", "no"),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("true", True),
        ("1:30", "1:30"),
        ("2026-01-02", "2026-01-02"),
        ("2026-01-02T03:04:05Z", "2026-01-02T03:04:05Z"),
        ("~", None),
        ("", None),
        ("'3e-4'", "3e-4"),
        ("[1, 2.0]", [1, 2.0]),
    ],
)
def test_plain_scalars_follow_yaml_1_2(text: str, value: Any) -> None:
    parsed = yaml_text.parse(text, "text")
    assert parsed == value
    assert type(parsed) is type(value)


def test_keys_are_text() -> None:
    assert yaml_text.parse("{5090: nvfp4, true: x}", "text") == {"5090": "nvfp4", "true": "x"}


@pytest.mark.parametrize("tree", [{"a": "3e-4"}, {"a": "no"}, {"a": 3e-4, "b": [1e-8, "7", 7]}, {"a": "~", "b": None}])
def test_what_is_dumped_is_read_back_as_the_same_types(tree: Any) -> None:
    assert repr(yaml_text.parse(yaml_text.dump(tree), "text")) == repr(tree)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a: 1\nb: 2\na: 3", 'file.yaml, line 3: found duplicate key "a"'),
        ("a: {b: 1, b: 1}", 'file.yaml, line 1: found duplicate key "b".'),
        ("a: {b: {c: 1}, b: {d: 1}}", 'file.yaml, line 1: found duplicate key "b".'),
        ("a: !mine {b}", "file.yaml, line 1: "),
        ("a: !!set {b}", "file.yaml: "),
        ("{[1]: 2}", "file.yaml: "),
        ("a: -_", "file.yaml: "),
        ("a: [1", "file.yaml, line 1: "),
        ("a: &x [*x]", "file.yaml: "),
    ],
)
def test_bad_yaml_names_file_and_line(text: str, place: str) -> None:
    with pytest.raises(UserError) as caught:
        yaml_text.parse(text, "file.yaml")
    assert str(caught.value).startswith(place)


def test_anchors_and_merge_keys_work() -> None:
    text = "base: &base {a: 1, b: 2}\nother: {<<: *base, b: 3}"
    assert yaml_text.parse(text, "text")["other"] == {"a": 1, "b": 3}


def test_what_one_caller_changes_is_not_what_the_next_gets() -> None:
    yaml_text.parse("a: [1]", "text")["a"].append(2)
    assert yaml_text.parse("a: [1]", "text") == {"a": [1]}


def test_a_long_path_stays_on_the_line_of_its_key() -> None:
    path = "/folder" * 40
    assert yaml_text.dump({"path": path}) == f"path: {path}\n"


def bomb(line: str) -> str:
    """Nine lines, each of which names the one before nine times."""
    names = [f"*a{number}" for number in range(9)]
    lines = (f"b{n}: &a{n + 1} {line.format(', '.join([name] * 9))}" for n, name in enumerate(names))
    return "\n".join(["first: &a0 {x: 1, y: 2}", *lines])


@pytest.mark.parametrize("text", [bomb("[{}]"), bomb("{{<<: [{}]}}"), "&a [*a]", "a: &a {b: *a}"])
def test_aliases_that_unfold_without_end_are_refused_at_once(text: str) -> None:
    with pytest.raises(UserError, match=r"^text: with its aliases it has more than 100,000 values\.$"):
        yaml_text.parse(text, "text")


def test_aliases_of_common_size_are_followed() -> None:
    text = "a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]"
    assert yaml_text.parse(text, "text") == {"a": {"x": 1}, "b": {"x": 1, "y": 2}, "c": [{"x": 1}, {"x": 1}]}


def test_a_text_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(UserError, match=r"^text: it is nested too deeply"):
        yaml_text.parse("[" * 2_000, "text")
