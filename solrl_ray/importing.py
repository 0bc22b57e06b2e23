"""Importing what takes seconds."""

from __future__ import annotations

import gc
import importlib
from types import ModuleType


def import_large(name: str) -> ModuleType:
    """Import a module that brings a model library with it, without looking for garbage meanwhile.

    Classes, functions and registries are half a million objects, and all of them stay: searching them over and over
    while they are made takes a fifth of the time. Only imports are spared the search: what is loaded may leave garbage.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        if was_enabled:
            gc.enable()
