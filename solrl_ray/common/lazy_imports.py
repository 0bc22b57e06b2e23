"""Imports of model libraries, which take seconds, without garbage collection."""

from __future__ import annotations

import atexit
import gc
import importlib
import sys
from typing import Any


def import_large(name: str, attribute: str = "") -> Any:
    """Import a module that imports a model library, without garbage collection, then or later.

    Its classes, functions and registries are half a million permanent objects. Collections during the import take a
    fifth of its time, and each full one afterwards half a second. So objects that exist after the import are never
    collected; later ones are.

    Returns the module, or this attribute of it: diffusers and transformers import a class when it is asked for.
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
        gc.collect()  # a traceback in a cycle has the frames of all callers, and so what they refer to
        gc.freeze()
        if was_enabled:
            gc.enable()


atexit.register(gc.unfreeze)  # else libraries report them as leaks at the end
