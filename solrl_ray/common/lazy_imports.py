"""Imports of model libraries, which take seconds, without garbage collection."""

from __future__ import annotations

import atexit
import gc
import importlib
import sys
from types import ModuleType


def import_large(name: str) -> ModuleType:
    """Import a module that imports a model library, without garbage collection, then or later.

    Its classes, functions and registries are half a million permanent objects. Collections during the import take a
    fifth of its time, and each full one afterwards half a second. So objects that exist after the import are never
    collected; later ones are.
    """
    if name in sys.modules:
        return sys.modules[name]
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.collect()  # a traceback in a cycle has the frames of all callers, and so what they refer to
        gc.freeze()
        if was_enabled:
            gc.enable()


atexit.register(gc.unfreeze)  # else libraries report them as leaks at the end
