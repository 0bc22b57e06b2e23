"""A configuration as a service gets it that others may read: it says how a run was trained, not where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from solrl_ray.config.schema import Config
from solrl_ray.models import paths

LEFT_OUT = frozenset({"url", "request", "upload", "network", "labels", "fallback_labels"})
"""Keys of addresses, of what is sent to a judge, which may hold a secret, and of what names machines."""
WORDS = frozenset({"text", "pattern"})
"""Keys whose values are no paths, whatever is in them: of a judge's question."""
IDS = frozenset({"path", "base", "preview_decoder", "model", "space"})
"""Keys whose values may be Hugging Face ids."""


def redacted(config: Config) -> dict[str, Any]:
    """The configuration as JSON has it, without `LEFT_OUT`; of local paths the last part alone."""
    shown: dict[str, Any] = _shown("", config.model_dump(mode="json"))
    return shown


def _shown(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shown(name, inner) for name, inner in value.items() if name not in LEFT_OUT}
    if isinstance(value, list):
        return [_shown(key, inner) for inner in value]
    return _last_part(key, value) if isinstance(value, str) and key not in WORDS else value


def _last_part(key: str, text: str) -> str:
    """Of a path, and of a function in a file; anything else stays, but for an address, which is empty then."""
    if "://" in text:
        return ""
    if "/" not in text or text.startswith(paths.BUILTIN):
        return text
    return text if key in IDS and isinstance(paths.resolve(text), str) else Path(text).name
