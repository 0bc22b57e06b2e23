"""YAML as people write it: the scalars of YAML 1.2's core schema, and no key twice.

PyYAML follows YAML 1.1, where ``3e-4`` is text, ``no`` is false, ``1:30`` is ninety and a repeated key
wins without a word. Here scalars follow the core schema of YAML 1.2.2 (section 10.3.2), and a repeated key
is an error.
"""

from __future__ import annotations

import copy
import math
import re
from functools import lru_cache
from typing import Any

import yaml

from solrl_ray.errors import UserError

_SCALARS: tuple[tuple[str, str, str], ...] = (
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", "~nN\0"),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("tag:yaml.org,2002:merge", r"<<", "<"),
)


def _resolvers() -> dict[str | None, list[tuple[str, re.Pattern[str]]]]:
    """First character of a plain scalar → (tag, pattern), the table PyYAML looks scalars up in."""
    table: dict[str | None, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, first_characters in _SCALARS:
        compiled = re.compile(rf"^(?:{pattern})$")
        for character in first_characters:
            table.setdefault("" if character == "\0" else character, []).append((tag, compiled))
    return table


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _resolvers()


class _Dumper(yaml.SafeDumper):
    # The same table decides what needs quotes, so that text such as "3e-4" is read back as text.
    yaml_implicit_resolvers = _resolvers()


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[str, Any]:
    seen: set[str] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} must be text", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key '{key}' appears twice in one section", key_node.start_mark
            )
        seen.add(key)
    return dict(loader.construct_mapping(node, deep=True))


def _int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    for prefix, base in (("0o", 8), ("0x", 16)):
        if text.startswith(prefix):
            return int(text[2:], base)
    return int(text)


def _float(loader: _Loader, node: yaml.ScalarNode) -> float:
    text = str(loader.construct_scalar(node)).lower()
    value = float(text.replace(".inf", "inf").replace(".nan", "nan"))
    if not math.isfinite(value):
        raise yaml.constructor.ConstructorError(None, None, f"{text} is no finite number", node.start_mark)
    return value


def _sequence(loader: _Loader, node: yaml.SequenceNode) -> list[Any]:
    return list(loader.construct_sequence(node, deep=True))


_SAFE = yaml.SafeLoader.yaml_constructors
# Nothing but what JSON has too: no dates, sets or binary.
_Loader.yaml_constructors = {
    None: _SAFE[None],
    "tag:yaml.org,2002:null": _SAFE["tag:yaml.org,2002:null"],
    "tag:yaml.org,2002:bool": _SAFE["tag:yaml.org,2002:bool"],
    "tag:yaml.org,2002:str": _SAFE["tag:yaml.org,2002:str"],
    "tag:yaml.org,2002:int": _int,
    "tag:yaml.org,2002:float": _float,
    "tag:yaml.org,2002:seq": _sequence,
    "tag:yaml.org,2002:map": _mapping,
}


def parse(text: str, source: str) -> Any:
    """The value of one YAML document.

    `source` names the text in errors. Raises UserError for bad syntax, a repeated key, a key that is not
    text, or a number that is not finite.
    """
    return copy.deepcopy(_parsed(text, source))  # callers change what they get


@lru_cache(maxsize=256)
def _parsed(text: str, source: str) -> Any:
    """One part is read for each of the hundreds of compositions that it is in."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{source}{line}: {error.problem or error.context}.") from None
    except yaml.YAMLError as error:
        raise UserError(f"{source}: {' '.join(str(error).split())}.") from None


def dump(tree: Any) -> str:
    """YAML text that `parse` reads back as an equal tree; keys keep their order."""
    return str(yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110))
