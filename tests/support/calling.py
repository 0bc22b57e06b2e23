"""Calls a function in the process of this program: ``calling.py MODULE:FUNCTION ARGUMENT…``."""

from __future__ import annotations

import importlib
import sys

if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    getattr(importlib.import_module(module), name)(*sys.argv[2:])
