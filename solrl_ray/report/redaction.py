"""A configuration for services that others may read: it says how a run was trained, not where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from solrl_ray.config.schema import Config
from solrl_ray.models import paths

LEFT_OUT = frozenset({"url", "request", "upload", "network", "labels", "fallback_labels"})
"""Keys of addresses, of requests to a judge, which may hold a secret, and of names of machines."""
WORDS = frozenset({"text", "pattern"})
"""Keys of a judge's question, whose values are never paths."""
IDS = frozenset({"path", "base", "preview_decoder", "model", "space"})
"""Keys whose values may be Hugging Face ids."""


def redacted(config: Config) -> dict[str, Any]:
    """The configuration as JSON, without `LEFT_OUT`; local paths are reduced to their last part."""
    shown: dict[str, Any] = _shown("", config.model_dump(mode="json"))
    return shown


def _shown(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shown(name, inner) for name, inner in value.items() if name not in LEFT_OUT}
    if isinstance(value, list):
        return [_shown(key, inner) for inner in value]
    return _last_part(key, value) if isinstance(value, str) and key not in WORDS else value


def _last_part(key: str, text: str) -> str:
    """The last part of a path, or of a function in a file; empty for an address; any other text unchanged."""
    if "://" in text:
        return ""
    if "/" not in text or text.startswith(paths.BUILTIN):
        return text
    return text if key in IDS and isinstance(paths.resolve(text), str) else Path(text).name
