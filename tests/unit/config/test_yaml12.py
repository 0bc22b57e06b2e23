"""YAML as it is read and written: the scalars of YAML 1.2, and no key twice."""

from __future__ import annotations

from typing import Any

import pytest

from solrl_ray.config import yaml12
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
        ("true", True),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2026-01-02", "2026-01-02"),
        ("~", None),
        ("", None),
        ("'3e-4'", "3e-4"),
        ("[1, 2.0]", [1, 2.0]),
    ],
)
def test_plain_scalars_follow_yaml_1_2(text: str, value: Any) -> None:
    parsed = yaml12.parse(text, "text")
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize("tree", [{"a": "3e-4"}, {"a": "no"}, {"a": 3e-4, "b": [1e-8, "7", 7]}, {"a": "~", "b": None}])
def test_what_is_dumped_is_read_back_as_the_same_types(tree: Any) -> None:
    assert repr(yaml12.parse(yaml12.dump(tree), "text")) == repr(tree)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: 2\na: 3", "file.yaml, line 3: the key 'a' appears twice in one section."),
        ("a: {b: 1, b: 1}", "file.yaml, line 1: the key 'b' appears twice in one section."),
        ("1: 2", "file.yaml, line 1: the key 1 must be text."),
        ("a: .inf", "file.yaml, line 1: .inf is no finite number."),
        ("a: 1e999", "file.yaml, line 1: 1e999 is no finite number."),
        ("a: !!set {b}", "file.yaml, line 1: could not determine a constructor for the tag"),
        ("a: [1", "file.yaml, line 1: expected ',' or ']'"),
        ("a: &x [*x]", "file.yaml, line 1: found unconstructable recursive node."),
    ],
)
def test_bad_yaml_names_file_and_line(text: str, problem: str) -> None:
    with pytest.raises(UserError) as caught:
        yaml12.parse(text, "file.yaml")
    assert str(caught.value).startswith(problem)


def test_anchors_and_merge_keys_work() -> None:
    text = "base: &base {a: 1, b: 2}\nother: {<<: *base, b: 3}"
    assert yaml12.parse(text, "text")["other"] == {"a": 1, "b": 3}
