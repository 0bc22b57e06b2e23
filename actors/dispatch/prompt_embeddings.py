"""Prompt embeddings by reference: encoded when first needed or asked for ahead, one copy a node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.cluster import wait
from solrl_ray.config.schema import Deadlines
from solrl_ray.records import Prompt


class PromptEmbeddings:
    def __init__(self, encoder: Any, deadlines: Deadlines) -> None:
        self._encoder = encoder
        self._deadlines = deadlines
        self._starting = encoder.start.remote()
        self._held: dict[str, Any] = {}
        """Those that `of` was asked for last."""
        self._ahead: dict[str, Any] = {}
        """Those that were asked for ahead, until `of` is asked for them."""

    def await_encoder(self) -> None:
        """Return once the encoder has started."""
        wait.get(self._starting, what="the start of the encoder", seconds=self._deadlines.start)

    def ask_ahead(self, prompts: Sequence[Prompt]) -> None:
        """Have prompts encoded that `of` will be asked for later, whatever it is asked for before; nobody waits."""
        self._ahead = self._refs(prompts)

    def of(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Prompt id → reference of its embedding, which is there. Others are let go, but for those asked for ahead."""
        refs = self._refs(prompts)
        missing = [ref for key, ref in refs.items() if key not in self._held]
        seconds = self._deadlines.encode * max(1, len(missing))
        wait.get(missing, what=f"encoding {len(missing)} prompts", seconds=seconds)
        self._held = refs
        self._ahead = {key: ref for key, ref in self._ahead.items() if key not in refs}
        return dict(refs)

    def _refs(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Those that are here already, and of the others those that the encoder will make."""
        here = self._held | self._ahead
        return {p.id: here.get(p.id) or self._encoder.embed.remote(p) for p in prompts}
