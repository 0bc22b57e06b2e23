"""Prompt embeddings: encoded by all encoders when first needed or ahead of time, kept on disk, given by reference."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from actors.world import Sent, Tasks, World, on_disk
from solrl_ray.config.pools import encodes_on_cards, encoding_batch
from solrl_ray.config.schema import Config, Model
from solrl_ray.errors import RunError, UserError, WorkerGone
from solrl_ray.prompts.embedding_cache import EmbeddingCache
from solrl_ray.prompts.prompt_set import negative_prompt
from solrl_ray.prompts.references import contents
from solrl_ray.records import Prompt, PromptEmbedding

T = TypeVar("T")

TOGETHER = 64
"""Embeddings read at once; so many are in memory together."""


@dataclass(slots=True, eq=False)
class _Encoder:
    name: str
    actor: Any
    starting: Sent
    is_loaded: bool = True
    calls: deque[tuple[list[Prompt], Sent]] = field(default_factory=deque)
    """Micro-batches without an answer: one running, the other waiting."""


class PromptEmbeddings:
    """::

        encode ─► queue ─► a micro-batch ─► an encoder ─► the disk ─► of: references, one copy a node
                    ▲                          │ lost
                    └──────────────────────────┘

    An encoder gets its next micro-batch when its last is done, so encoders may differ in speed, join and be lost. Each
    answer is on the disk before its prompts count as encoded. On cards, text encoders leave when all are.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        world: World,
        tasks: Tasks,
        *,
        show: Callable[[str], None] = lambda words: None,
        lost: Callable[[str, Any, WorkerGone], bool] = lambda name, actor, error: False,
    ) -> None:
        """
        Args:
            folder: of the embeddings, on this node.
            show: told what is being encoded, and an empty text at the end.
            lost: told the name of a lost encoder, its actor and why; returns whether another will join. If none is
                left and none will join, the run ends.
        """
        self._config, self._model, self._evaluated = config, config.model, config.evaluated_model
        self._deadlines, self._keep_free = config.fleet.deadlines, config.checkpoints.min_free_gb
        self._batch, self._leaves = encoding_batch(config.fleet), encodes_on_cards(config.fleet)
        self._folder, self._world, self._tasks = folder, world, tasks
        self._show, self._lost = show, lost
        self._encoders: list[_Encoder] = []
        self._first: tuple[str, dict[str, str]] | None = None
        """The encoder that started first, and its identity."""
        self._cache: EmbeddingCache
        """From then on."""
        self.started = asyncio.Event()
        """Set once an encoder has."""
        self._queue: deque[Prompt] = deque()
        self._is_wanted = asyncio.Event()
        """Whether the queue holds something."""
        self._coming: dict[str, asyncio.Future[None]] = {}
        """By prompt id: done when its embedding is on the disk."""
        self._counts = (0, 0)
        """Prompts encoded, and asked for, since there was nothing to do."""
        self._held: dict[tuple[str, Prompt | None], Any] = {}
        """References for the samples that `of` returned last, by prompt id and negative prompt (without pictures)."""

    # Encoders

    def join(self, name: str, actor: Any) -> None:
        """Start an encoder and use it from then on."""
        encoder = _Encoder(name, actor, self._world.send(actor, "start"))
        self._encoders.append(encoder)
        self._tasks.start(self._serve(encoder), f"the calls of {name}")

    # Prompts

    async def encode(self, prompts: Sequence[Prompt], further: Sequence[Prompt] = ()) -> int:
        """Encode what the disk lacks of `prompts`; if that is something, of `further` ones as well, as far as the disk
        has room. Returns how many prompts were encoded.

        Raises UserError for a reference picture that is gone or has changed.
        """
        await self.started.wait()
        prompts, further = self._with_negative(prompts), self._with_negative(further) if further else ()
        missing = await self._on_disk(lambda cache: cache.lacking(prompts), "looking for embeddings")
        if missing and further:
            missing += await self._on_disk(
                lambda cache: cache.affordable(cache.lacking(further), self._keep_free), "looking for embeddings"
            )
        if coming := list(dict.fromkeys(self._ask(prompt) for prompt in missing)):
            self._tell()
            await asyncio.wait(coming)
        if self._leaves and not self._coming:
            await self._leave()
        if errors := [error for each in coming if (error := each.exception())]:
            raise errors[-1]  # negative prompts, which the user does not know, are the first
        return len(coming)

    async def prefetch(self, prompts: Sequence[Prompt], further: Sequence[Prompt] = ()) -> None:
        """Make the next call of `of` fast; `further` as of `encode`."""
        await self.encode(prompts, further)
        await self.of(prompts)

    async def of(self, prompts: Sequence[Prompt], guidance_of: Model | None = None) -> dict[str, Any]:
        """Prompt id → reference of its finished embedding.

        `guidance_of`: whose negative prompt comes with each embedding, if any. None: that of the run's samples; these
        embeddings are then kept until the next such call, and all others only by the caller.
        """
        model = guidance_of or self._model
        negative = negative_prompt(model)
        wanted = {prompt.id: prompt for prompt in prompts}
        found = {key: self._held[key, negative] for key in wanted if (key, negative) in self._held}
        missing = [prompt for key, prompt in wanted.items() if key not in found]
        if missing:
            await self.encode(missing)
        for first in range(0, len(missing), TOGETHER):
            for embedding in await self._read(missing[first : first + TOGETHER], model):
                found[embedding.prompt_id] = self._world.put(embedding)
        if guidance_of is None:
            self._held = {(key, negative): found[key] for key in wanted}
        return {key: found[key] for key in wanted}

    async def one(self, prompt: Prompt, guidance_of: Model | None = None) -> Any:
        """Reference of one finished embedding. Only the caller keeps it; `guidance_of` as in `of`."""
        model = guidance_of or self._model
        if (prompt.id, negative_prompt(model)) in self._held:
            return self._held[prompt.id, negative_prompt(model)]
        await self.encode([prompt])
        return self._world.put((await self._read([prompt], model))[0])

    async def probe(self, prompt: Prompt) -> Any:
        """As `one`, for workers that compile with it: with a negative prompt if samples or evaluations have one."""
        return await self.one(prompt, self._model if self._model.cfg.is_on else self._evaluated)

    async def _leave(self) -> None:
        """Have the text encoders leave the cards. The next prompts bring them back."""
        loaded = [each for each in self._encoders if each.is_loaded]
        calls = [self._world.send(each.actor, "leave") for each in loaded]
        for encoder, call in zip(loaded, calls, strict=True):
            encoder.is_loaded = False
            with suppress(WorkerGone):  # noticed when it is next asked
                what = f"{encoder.name}, whose text encoders leave (fleet.deadlines.start),"
                await self._world.answer(call, what=what, seconds=self._deadlines.start)

    def _with_negative(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """`prompts` after the negative prompts of samples and evaluations, each once; those see the same references."""
        seen = dict.fromkeys([prompt.references for prompt in prompts] or ([] if self._model.references else [()]))
        negative = [negative_prompt(model, each) for model in (self._model, self._evaluated) for each in seen]
        # By id: the same picture may be in several files.
        return [*{prompt.id: prompt for prompt in negative if prompt}.values(), *prompts]

    async def _read(self, prompts: Sequence[Prompt], model: Model) -> list[PromptEmbedding]:
        """Embeddings that were on the disk, with those of negative prompts. What is damaged is encoded again."""
        against = {prompt.id: negative_prompt(model, prompt.references) for prompt in prompts}
        negative = [prompt for prompt in against.values() if prompt]
        wanted = list({prompt.id: prompt for prompt in [*prompts, *negative]}.values())
        for _ in range(2):
            read = await self._on_disk(lambda cache: [cache.read(prompt) for prompt in wanted], "reading embeddings")
            found = {embedding.prompt_id: embedding for embedding in read if embedding is not None}
            if len(found) == len(wanted):
                pairs = [(found[key], other) for key, other in against.items()]
                return [each.against(found[other.id]) if other else each for each, other in pairs]
            await self.encode(wanted)
        raise RunError(f"{self._folder} does not keep embeddings of prompts: some are damaged again after a moment")

    async def _on_disk(self, work: Callable[[EmbeddingCache], T], what: str) -> T:
        return await on_disk(self._world, self._config, self._folder, lambda: work(self._cache), what)

    # The queue

    def _ask(self, prompt: Prompt) -> asyncio.Future[None]:
        if prompt.id not in self._coming:
            self._coming[prompt.id] = asyncio.get_running_loop().create_future()
            self._queue.append(prompt)
            self._is_wanted.set()
            done, asked = self._counts
            self._counts = done, asked + 1
        return self._coming[prompt.id]

    async def _serve(self, encoder: _Encoder) -> None:
        """Start an encoder, then give it prompts until it is lost."""
        deadlines = self._deadlines
        try:
            what = f"the start of {encoder.name} (fleet.deadlines.start; raise it if the machine is slow or busy)"
            identity = await self._world.answer(encoder.starting, what=what, seconds=deadlines.start)
            self._agree(encoder.name, identity)
            while True:
                await self._is_wanted.wait()
                await self._give(encoder)
                while encoder.calls:
                    prompts, call = encoder.calls[0]
                    items = len(prompts) * (1 + self._model.references)
                    seconds = deadlines.encode * items + deadlines.start * self._leaves
                    many = "s" * (len(prompts) > 1)
                    what = f"encoding {len(prompts)} prompt{many} by {encoder.name} (fleet.deadlines.encode)"
                    made = await self._world.answer(call, what=what, seconds=seconds)
                    encoder.is_loaded = True
                    encoder.calls.popleft()
                    await self._give(encoder)
                    await self._keep(prompts, made)
        except WorkerGone as error:
            self._encoders.remove(encoder)
            for prompts, _ in reversed(encoder.calls):
                self._queue.extendleft(reversed(prompts))
                self._is_wanted.set()
            if not self._lost(encoder.name, encoder.actor, error) and not self._encoders:
                raise

    def _agree(self, name: str, identity: dict[str, str]) -> None:
        """Raise RunError if an encoder would make other embeddings than those before."""
        if self._first is None:
            self._first = name, identity
            self._cache = EmbeddingCache(self._folder, identity)
            self.started.set()
        first, expected = self._first
        for key in sorted(identity.keys() | expected.keys()):
            if identity.get(key) != expected.get(key):
                raise RunError(
                    f"{name} would make other embeddings than {first}: its {key} is {identity.get(key)}, not "
                    f"{expected.get(key)}; all encoders need the same checkpoint, libraries and kind of device"
                )

    async def _give(self, encoder: _Encoder) -> None:
        """Send micro-batches: one, and another to wait behind it if there are enough for the other encoders."""
        size = self._batch
        while self._queue and (
            not encoder.calls or (len(encoder.calls) < 2 and len(self._queue) >= size * len(self._encoders))
        ):
            prompts = [self._queue.popleft() for _ in range(min(size, len(self._queue)))]
            if self._model.references:
                files = await self._pictures(prompts)
                prompts = [prompt for prompt in prompts if prompt.id in files]
                args = [list(files.values())]
            else:
                args = []
            if prompts:
                encoder.calls.append((prompts, self._world.send(encoder.actor, "embed", prompts, *args)))
        if not self._queue:
            self._is_wanted.clear()

    async def _pictures(self, prompts: Sequence[Prompt]) -> dict[str, tuple[bytes, ...]]:
        """By prompt id, the files of their references: an encoder may be on a machine that lacks them. Who asked for a
        prompt with a file that cannot be taken gets the error; the prompt is left out.
        """
        what = "reading reference pictures (fleet.deadlines.checkpoint)"
        read = await self._world.blocking(lambda: list(map(_files, prompts)), what, self._deadlines.checkpoint)
        files = dict[str, tuple[bytes, ...]]()
        for prompt, found in zip(prompts, read, strict=True):
            if isinstance(found, UserError):
                self._coming.pop(prompt.id).set_exception(found)
            else:
                files[prompt.id] = found
        self._done(len(prompts) - len(files))
        return files

    async def _keep(self, prompts: Sequence[Prompt], made: Sequence[PromptEmbedding]) -> None:
        await self._on_disk(lambda cache: cache.write(prompts, made), "writing embeddings")
        for prompt in prompts:
            self._coming.pop(prompt.id).set_result(None)
        self._done(len(prompts))

    def _done(self, count: int) -> None:
        if count:
            done, asked = self._counts
            self._counts = done + count, asked
            self._tell()

    def _tell(self) -> None:
        if self._coming:
            self._show("encoding prompts {:,} of {:,}".format(*self._counts))
        else:
            self._counts = 0, 0
            self._show("")


def _files(prompt: Prompt) -> tuple[bytes, ...] | UserError:
    """The contents of a prompt's pictures, or why they cannot be had."""
    try:
        return contents(prompt)
    except UserError as error:
        return error
