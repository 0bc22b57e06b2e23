"""Prompt embeddings by reference: encoded when first needed or ahead of time, one copy a node."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actors.world import Sent, World
from solrl_ray.config.deadlines import Deadlines
from solrl_ray.records import Prompt

TOGETHER = 64
"""Prompts in one message to the encoder; it holds their embeddings in memory together."""


@dataclass(frozen=True, slots=True)
class _Embedding:
    call: Sent
    """The call that made it, together with others."""
    reference: Any


class PromptEmbeddings:
    def __init__(self, world: World, deadlines: Deadlines) -> None:
        self._world = world
        self._deadlines = deadlines
        self._encoder = world.text_encoder()
        self._starting = world.send(self._encoder, "start")
        self._held: dict[str, _Embedding] = {}
        """Embeddings that `of` returned last."""
        self._ahead: dict[str, _Embedding] = {}
        """Embeddings asked for ahead, until `of` takes them."""

    async def await_encoder(self) -> None:
        """Return once the text encoder has started."""
        what, seconds = "the start of the text encoder", self._deadlines.start
        what += " (fleet.deadlines.start; raise it if the machine is slow or busy)"
        await self._world.answer(self._starting, what=what, seconds=seconds)

    def ask_ahead(self, prompts: Sequence[Prompt]) -> None:
        """Start encoding prompts for later calls of `of`, without waiting. They survive calls in between."""
        self._ahead = self._calls(prompts)

    async def of(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Prompt id → reference of its finished embedding. All others are freed, except those asked for ahead."""
        found = self._calls(prompts)
        missing = [each for key, each in found.items() if key not in self._held]
        what, seconds = f"encoding {len(missing)} prompts", self._deadlines.encode * max(1, len(missing))
        calls = {id(each.call): each.call for each in missing}
        await asyncio.gather(*[self._world.answer(call, what=what, seconds=seconds) for call in calls.values()])
        self._held = found
        self._ahead = {key: each for key, each in self._ahead.items() if key not in found}
        return {key: each.reference for key, each in found.items()}

    async def one(self, prompt: Prompt) -> Any:
        """Reference of one finished embedding. Only the caller keeps it."""
        found = self._calls([prompt])[prompt.id]
        await self._world.answer(found.call, what=f"encoding prompt {prompt.id}", seconds=self._deadlines.encode)
        return found.reference

    def _calls(self, prompts: Sequence[Prompt]) -> dict[str, _Embedding]:
        """Embeddings that exist already, and calls for the others."""
        found = self._held | self._ahead
        wanted = {prompt.id: prompt for prompt in prompts}
        missing = [prompt for key, prompt in wanted.items() if key not in found]
        for first in range(0, len(missing), TOGETHER):
            together = missing[first : first + TOGETHER]
            call, references = self._world.send_each(self._encoder, "embed", together)
            made = zip(together, references, strict=True)
            found |= {prompt.id: _Embedding(call, reference) for prompt, reference in made}
        return {key: found[key] for key in wanted}
