"""Imports model libraries, which takes seconds, without garbage collection."""

from __future__ import annotations

import atexit
import gc
import importlib
import sys
from typing import Any


def import_large(name: str, attribute: str = "") -> Any:
    """Import a module that imports a model library, and exempt its objects from garbage collection.

    These are half a million permanent objects: classes, functions, registries. Collections during the import take a
    fifth of its time, and every full collection afterwards half a second. So all objects that exist after the import
    are excluded from collection (`gc.freeze`); later ones are not.

    Returns the module, or its `attribute`: diffusers and transformers import a class when it is accessed.
    """
    module = sys.modules.get(name)
    if module is not None and (not attribute or attribute in vars(module)):
        return getattr(module, attribute) if attribute else module
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        module = importlib.import_module(name)
        return getattr(module, attribute) if attribute else module
    finally:
        gc.collect()  # first free cycles: a traceback in one keeps the frames of all callers and their objects
        gc.freeze()
        if was_enabled:
            gc.enable()


atexit.register(gc.unfreeze)  # otherwise libraries report the frozen objects as leaks at exit
