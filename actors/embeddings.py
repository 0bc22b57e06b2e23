"""Prompt embeddings by reference: encoded when first needed or asked for ahead, one copy a node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors import waiting
from solrl_ray.config.schema import Deadlines
from solrl_ray.records import Prompt


class Embeddings:
    def __init__(self, encoder: Any, deadlines: Deadlines) -> None:
        self._encoder = encoder
        self._deadlines = deadlines
        self._starting = encoder.start.remote()
        self._held: dict[str, Any] = {}
        self._ahead: dict[str, Any] = {}
        """Those that were asked for ahead."""

    def await_encoder(self) -> None:
        """Return once the encoder has started."""
        waiting.get(self._starting, what="the start of the encoder", seconds=self._deadlines.start)

    def ask_ahead(self, prompts: Sequence[Prompt]) -> None:
        """Have prompts encoded that `of` will be asked for next; nobody waits for it."""
        self._ahead = {p.id: self._encoder.embed.remote(p) for p in prompts if p.id not in self._held}

    def of(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Prompt id → reference of its embedding, which is there. Those of other prompts are let go."""
        self._held = {p.id: ref for p in prompts if (ref := self._held.get(p.id)) is not None}
        missing = [p for p in prompts if p.id not in self._held]
        refs = {p.id: self._ahead.get(p.id) or self._encoder.embed.remote(p) for p in missing}
        self._ahead.clear()
        seconds = self._deadlines.encode * max(1, len(refs))
        waiting.get(list(refs.values()), what=f"encoding {len(refs)} prompts", seconds=seconds)
        self._held |= refs
        return dict(self._held)
