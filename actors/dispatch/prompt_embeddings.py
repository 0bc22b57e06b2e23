"""Prompt embeddings by reference: encoded when first needed or asked for ahead, one copy a node."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from actors.world import Sent, World
from solrl_ray.config.schema import Deadlines
from solrl_ray.records import Prompt


class PromptEmbeddings:
    def __init__(self, world: World, deadlines: Deadlines) -> None:
        self._world = world
        self._deadlines = deadlines
        self._encoder = world.text_encoder()
        self._starting = world.send(self._encoder, "start")
        self._held: dict[str, Sent] = {}
        """Those that `of` was asked for last."""
        self._ahead: dict[str, Sent] = {}
        """Those that were asked for ahead, until `of` is asked for them."""

    async def await_encoder(self) -> None:
        """Return once the text encoder has started."""
        seconds = self._deadlines.start
        await self._world.answer(self._starting, what="the start of the text encoder", seconds=seconds)

    def ask_ahead(self, prompts: Sequence[Prompt]) -> None:
        """Have prompts encoded that `of` will be asked for later, whatever it is asked for before; nobody waits."""
        self._ahead = self._calls(prompts)

    async def of(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Prompt id → reference of its embedding, which is there. Others are let go, but for those asked for ahead."""
        calls = self._calls(prompts)
        missing = [call for key, call in calls.items() if key not in self._held]
        what, seconds = f"encoding {len(missing)} prompts", self._deadlines.encode * max(1, len(missing))
        await asyncio.gather(*[self._world.answer(call, what=what, seconds=seconds) for call in missing])
        self._held = calls
        self._ahead = {key: call for key, call in self._ahead.items() if key not in calls}
        return {key: call.answer for key, call in calls.items()}

    async def one(self, prompt: Prompt) -> Any:
        """Reference of one embedding, which is there. Only whoever asks keeps it."""
        call = self._calls([prompt])[prompt.id]
        await self._world.answer(call, what=f"encoding prompt {prompt.id}", seconds=self._deadlines.encode)
        return call.answer

    def _calls(self, prompts: Sequence[Prompt]) -> dict[str, Sent]:
        """Those that are here already, and of the others those that the encoder will make."""
        here = self._held | self._ahead
        return {p.id: here.get(p.id) or self._world.send(self._encoder, "embed", p) for p in prompts}
