"""``python -m solrl_ray`` is the command ``solrl``."""

from __future__ import annotations

from solrl_ray.cli import main

raise SystemExit(main())
