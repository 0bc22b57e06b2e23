"""YAML 1.2 as ruamel.yaml reads and writes it, limited to JSON's values."""

from __future__ import annotations

import io
import json
from functools import lru_cache
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from solrl_ray.errors import UserError


class _Constructor(SafeConstructor):
    """A date stays text, as in the core schema of YAML 1.2; ruamel.yaml would parse it."""


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
    except (YAMLError, ValueError, TypeError) as error:
        raise UserError(f"{source}: {' '.join(str(error).split())}.") from None


def dump(tree: Any) -> str:
    """YAML text that `parse` reads back as an equal tree; keys keep their order."""
    text = io.StringIO()
    _yaml().dump(tree, text)
    return text.getvalue()
