"""YAML 1.2 as ruamel.yaml reads and writes it, limited to JSON's values."""

from __future__ import annotations

import io
import json
from functools import lru_cache
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import Node, ScalarNode

from solrl_ray.errors import UserError

MOST_VALUES = 100_000
"""Of a document, those that its aliases repeat counted each time."""


class _Constructor(SafeConstructor):
    """A date stays text, as in the core schema of YAML 1.2; ruamel.yaml would parse it."""

    def construct_document(self, node: Node) -> Any:
        _count(node, {})
        return super().construct_document(node)


def _count(node: Node, known: dict[int, int]) -> int:
    """How many values a node has, its aliases followed. Raises ValueError if it has too many, or itself."""
    if id(node) not in known:
        known[id(node)] = MOST_VALUES  # until it is counted: inside itself, it is too many
        inside = () if isinstance(node, ScalarNode) else node.value
        parts = (part for each in inside for part in (each if isinstance(each, tuple) else (each,)))  # key, value
        known[id(node)] = 1 + sum(_count(part, known) for part in parts)
    if known[id(node)] > MOST_VALUES:
        raise ValueError(f"with its aliases it has more than {MOST_VALUES:,} values")
    return known[id(node)]


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


def _yaml() -> YAML:
    # Its C library would read YAML 1.1.
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 10_000  # else a long path would begin on a new line
    return yaml


def parse(text: str, source: str) -> Any:
    """The value of one YAML document.

    `source` names the text in errors. Raises UserError for bad syntax, a repeated key, or a value that JSON lacks.
    """
    return json.loads(_as_json(text, source))  # a copy, because callers change it


@lru_cache(maxsize=256)
def _as_json(text: str, source: str) -> str:
    """Cached: a part is read again for each composition that contains it."""
    try:
        return json.dumps(_yaml().load(text))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        # For a repeated key it also shows the values, which are empty for sections.
        problem = str(error.problem or error.context).partition(" with value ")[0]
        raise UserError(f"{source}{line}: {problem}.") from None
    except RecursionError:
        raise UserError(f"{source}: it is nested too deeply.") from None
    except (YAMLError, ValueError, TypeError) as error:
        raise UserError(f"{source}: {' '.join(str(error).split())}.") from None


def dump(tree: Any) -> str:
    """YAML text that `parse` reads back as an equal tree; keys keep their order."""
    text = io.StringIO()
    _yaml().dump(tree, text)
    return text.getvalue()
