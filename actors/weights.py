"""How a worker holds a policy revision: loaded in place, proved by a receipt, checked before every unit."""

from __future__ import annotations
