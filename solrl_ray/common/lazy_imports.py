"""Importing what takes seconds."""

from __future__ import annotations

import atexit
import gc
import importlib
import sys
from types import ModuleType


def import_large(name: str) -> ModuleType:
    """Import a module that brings a model library with it, without looking for garbage, then or later.

    Classes, functions and registries are half a million objects, and all of them stay: searching them over and over
    while they are made takes a fifth of the time, and each full search afterwards half a second. So what there is
    after such an import is never searched again. What is loaded later may leave garbage, and is.
    """
    if name in sys.modules:
        return sys.modules[name]
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


atexit.register(gc.unfreeze)  # libraries tell at the end of what they take for leaks
