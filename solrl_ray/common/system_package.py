"""This installation's package `actors`, also where the user's folder has a package of that name."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from solrl_ray.errors import UserError

NAME = "actors"
FOLDER = Path(__file__).parents[2]
"""The folder that holds this installation's packages."""
_FILE = FOLDER / NAME / "__init__.py"


def settle() -> None:
    """Import this installation's `actors` by its location, before a folder earlier on Python's path can shadow it.

    Raises UserError if this process has imported another package of that name.
    """
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(NAME, _FILE, submodule_search_locations=[str(_FILE.parent)])
        assert spec is not None
        assert spec.loader is not None
        sys.modules[NAME] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    found = sys.modules[NAME]
    place = Path(found.__file__).parent if found.__file__ else Path(next(iter(found.__path__)))
    if place.resolve() != _FILE.parent.resolve():
        raise UserError(
            f"The package '{NAME}' was imported from {place}, but solrl_ray's own is {_FILE.parent}; "
            "start from another folder or rename the other package."
        )


def is_shadowed() -> bool:
    """True if a folder earlier on Python's path has another package of that name."""
    found = PathFinder.find_spec(NAME)
    return found is not None and (found.origin is None or Path(found.origin).resolve() != _FILE.resolve())
