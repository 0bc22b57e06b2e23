"""Prompt embeddings: encoded when first needed or ahead of time, cached on disk, passed to workers by reference."""

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
"""Number of embeddings that are read together, which bounds the memory."""


@dataclass(slots=True, eq=False)
class _Encoder:
    name: str
    actor: Any
    starting: Sent
    is_loaded: bool = True
    calls: deque[tuple[list[Prompt], Sent]] = field(default_factory=deque)
    """Micro-batches without an answer: at most one running and one waiting."""


class PromptEmbeddings:
    """Encodes prompts on all text encoders and caches the results.

    ::

        encode ─► queue ─► micro-batch ─► an encoder ─► disk ─► of: references, one copy per node
                    ▲                         │ lost
                    └─────────────────────────┘

    An encoder gets its next micro-batch when it has finished one, so encoders may differ in speed, join and be lost. A
    prompt counts as encoded once its embedding is on disk. On shared GPUs, text encoders are unloaded as soon as the
    queue is empty.
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
            folder: folder of the embedding cache, on this node.
            show: called with the progress in words, and with an empty text at the end.
            lost: called with the name of a lost encoder, its actor and the error; returns True if a replacement joins.
                The run ends if no encoder is left and none joins.
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
        """Set when the first encoder has started."""
        self.started = asyncio.Event()
        """Set when the first encoder has started."""
        self._queue: deque[Prompt] = deque()
        self._is_wanted = asyncio.Event()
        """Set while the queue is not empty."""
        self._coming: dict[str, asyncio.Future[None]] = {}
        """Prompt id → future, done when the embedding is on disk."""
        self._counts = (0, 0)
        """Numbers of prompts encoded and requested since the queue was last empty."""
        self._held: dict[tuple[str, Prompt | None], Any] = {}
        """Prompt id and negative prompt (without its reference images) → reference, from the last call of `of` for
        samples.
        """

    # Encoders

    def join(self, name: str, actor: Any) -> None:
        """Start an encoder and use it once it has started."""
        encoder = _Encoder(name, actor, self._world.send(actor, "start"))
        self._encoders.append(encoder)
        self._tasks.start(self._serve(encoder), f"the calls of {name}")

    # Prompts

    async def encode(self, prompts: Sequence[Prompt], further: Sequence[Prompt] = ()) -> int:
        """Encode those of `prompts` that are not on disk. If there are any, also encode the missing ones of `further`,
        as far as the disk has room. Returns the number of prompts encoded.

        Raises UserError if a reference image is missing or has changed.
        """
        await self.started.wait()
        prompts, further = self._with_negative(prompts), self._with_negative(further) if further else ()
        missing = await self._on_disk(lambda cache: cache.lacking(prompts), "looking for embeddings")
        if missing and further:
            missing += await self._on_disk(
                lambda cache: cache.affordable(cache.lacking(further), self._keep_free), "looking for embeddings"
            )
        if coming := list(dict.fromkeys(self._enqueue(prompt) for prompt in missing)):
            self._show_progress()
            await asyncio.wait(coming)
        if self._leaves and not self._coming:
            await self._unload()
        if errors := [error for future in coming if (error := future.exception())]:
            raise errors[-1]  # the last: the first ones are about negative prompts, which the user did not write
        return len(coming)

    async def prefetch(self, prompts: Sequence[Prompt], further: Sequence[Prompt] = ()) -> None:
        """Encode and read these prompts, so that the next call of `of` is fast; `further` as in `encode`."""
        await self.encode(prompts, further)
        await self.of(prompts)

    async def of(self, prompts: Sequence[Prompt], guidance_of: Model | None = None) -> dict[str, Any]:
        """Prompt id → reference to its embedding, encoded first if needed.

        `guidance_of`: the model configuration whose negative prompt, if any, is part of each embedding. None: that of
        the run's samples. These references are held until the next such call; the caller must hold all others.
        """
        model = guidance_of or self._model
        negative = negative_prompt(model)
        wanted = {prompt.id: prompt for prompt in prompts}
        references = {key: self._held[key, negative] for key in wanted if (key, negative) in self._held}
        missing = [prompt for key, prompt in wanted.items() if key not in references]
        if missing:
            await self.encode(missing)
        for first in range(0, len(missing), TOGETHER):
            for embedding in await self._read(missing[first : first + TOGETHER], model):
                references[embedding.prompt_id] = self._world.put(embedding)
        if guidance_of is None:
            self._held = {(key, negative): references[key] for key in wanted}
        return {key: references[key] for key in wanted}

    async def one(self, prompt: Prompt, guidance_of: Model | None = None) -> Any:
        """Reference to one embedding, which the caller must hold; `guidance_of` as in `of`."""
        model = guidance_of or self._model
        if (prompt.id, negative_prompt(model)) in self._held:
            return self._held[prompt.id, negative_prompt(model)]
        await self.encode([prompt])
        return self._world.put((await self._read([prompt], model))[0])

    async def probe(self, prompt: Prompt) -> Any:
        """`one` for workers that compile with it: with a negative prompt if samples or evaluations have one."""
        return await self.one(prompt, self._model if self._model.cfg.is_on else self._evaluated)

    async def _unload(self) -> None:
        """Unload the text encoders from the GPUs. The next prompts load them again."""
        loaded = [encoder for encoder in self._encoders if encoder.is_loaded]
        calls = [self._world.send(encoder.actor, "leave") for encoder in loaded]
        for encoder, call in zip(loaded, calls, strict=True):
            encoder.is_loaded = False
            with suppress(WorkerGone):  # the next call notices the loss
                what = f"unloading the text encoders of {encoder.name} (fleet.deadlines.start)"
                await self._world.answer(call, what=what, seconds=self._deadlines.start)

    def _with_negative(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The negative prompts of samples and evaluations, each once, followed by `prompts`.

        A negative prompt is encoded with the reference images of its prompt.
        """
        seen = dict.fromkeys([prompt.references for prompt in prompts] or ([] if self._model.references else [()]))
        negative = [negative_prompt(model, each) for model in (self._model, self._evaluated) for each in seen]
        # Unique by id: the same image may be in several files.
        return [*{prompt.id: prompt for prompt in negative if prompt}.values(), *prompts]

    async def _read(self, prompts: Sequence[Prompt], model: Model) -> list[PromptEmbedding]:
        """Read embeddings from disk, together with those of their negative prompts. Damaged ones are encoded again."""
        against = {prompt.id: negative_prompt(model, prompt.references) for prompt in prompts}
        negative = [prompt for prompt in against.values() if prompt]
        wanted = list({prompt.id: prompt for prompt in [*prompts, *negative]}.values())
        for _ in range(2):
            read = await self._on_disk(lambda cache: [cache.read(prompt) for prompt in wanted], "reading embeddings")
            embeddings = {embedding.prompt_id: embedding for embedding in read if embedding is not None}
            if len(embeddings) == len(wanted):
                pairs = [(embeddings[key], other) for key, other in against.items()]
                return [own.against(embeddings[other.id]) if other else own for own, other in pairs]
            await self.encode(wanted)
        raise RunError(
            f"embeddings in {self._folder} are damaged again right after they were written; check this disk, then "
            "resume the run"
        )

    async def _on_disk(self, work: Callable[[EmbeddingCache], T], what: str) -> T:
        return await on_disk(self._world, self._config, self._folder, lambda: work(self._cache), what)

    # The queue

    def _enqueue(self, prompt: Prompt) -> asyncio.Future[None]:
        if prompt.id not in self._coming:
            self._coming[prompt.id] = asyncio.get_running_loop().create_future()
            self._queue.append(prompt)
            self._is_wanted.set()
            done, requested = self._counts
            self._counts = done, requested + 1
        return self._coming[prompt.id]

    async def _serve(self, encoder: _Encoder) -> None:
        """Start an encoder, then send it prompts until it is lost."""
        deadlines = self._deadlines
        try:
            what = f"the start of {encoder.name} (fleet.deadlines.start; raise it if the machine is slow or busy)"
            identity = await self._world.answer(encoder.starting, what=what, seconds=deadlines.start)
            self._check_identity(encoder.name, identity)
            while True:
                await self._is_wanted.wait()
                await self._send_micro_batches(encoder)
                while encoder.calls:
                    prompts, call = encoder.calls[0]
                    items = len(prompts) * (1 + self._model.references)
                    seconds = deadlines.encode * items + deadlines.start * self._leaves
                    many = "s" * (len(prompts) > 1)
                    what = f"encoding {len(prompts)} prompt{many} by {encoder.name} (fleet.deadlines.encode)"
                    made = await self._world.answer(call, what=what, seconds=seconds)
                    encoder.is_loaded = True
                    encoder.calls.popleft()
                    await self._send_micro_batches(encoder)
                    await self._on_encoded(prompts, made)
        except WorkerGone as error:
            self._encoders.remove(encoder)
            for prompts, _ in reversed(encoder.calls):
                self._queue.extendleft(reversed(prompts))
                self._is_wanted.set()
            if not self._lost(encoder.name, encoder.actor, error) and not self._encoders:
                raise

    def _check_identity(self, name: str, identity: dict[str, str]) -> None:
        """Raises RunError if an encoder would make other embeddings than the first one."""
        if self._first is None:
            self._first = name, identity
            self._cache = EmbeddingCache(self._folder, identity)
            self.started.set()
        first, expected = self._first
        for key in sorted(identity.keys() | expected.keys()):
            if identity.get(key) != expected.get(key):
                raise RunError(
                    f"{name} would make different embeddings than {first}: its {key} is {identity.get(key)}, not "
                    f"{expected.get(key)}; all encoders need the same checkpoint, libraries and kind of device"
                )

    async def _send_micro_batches(self, encoder: _Encoder) -> None:
        """Send an idle encoder a micro-batch, and a second one to wait behind it if enough are left for the others."""
        size = self._batch
        while self._queue and (
            not encoder.calls or (len(encoder.calls) < 2 and len(self._queue) >= size * len(self._encoders))
        ):
            prompts = [self._queue.popleft() for _ in range(min(size, len(self._queue)))]
            if self._model.references:
                files = await self._reference_files(prompts)
                prompts = [prompt for prompt in prompts if prompt.id in files]
                args = [list(files.values())]
            else:
                args = []
            if prompts:
                encoder.calls.append((prompts, self._world.send(encoder.actor, "embed", prompts, *args)))
        if not self._queue:
            self._is_wanted.clear()

    async def _reference_files(self, prompts: Sequence[Prompt]) -> dict[str, tuple[bytes, ...]]:
        """Prompt id → contents of its reference images, which may be missing on an encoder's machine.

        Prompts with an unreadable image are left out; the error is raised where they were requested.
        """
        what = "reading reference images (fleet.deadlines.checkpoint)"
        read = await self._world.blocking(lambda: list(map(_files, prompts)), what, self._deadlines.checkpoint)
        files = dict[str, tuple[bytes, ...]]()
        for prompt, content in zip(prompts, read, strict=True):
            if isinstance(content, UserError):
                self._coming.pop(prompt.id).set_exception(content)
            else:
                files[prompt.id] = content
        self._on_done(len(prompts) - len(files))
        return files

    async def _on_encoded(self, prompts: Sequence[Prompt], made: Sequence[PromptEmbedding]) -> None:
        await self._on_disk(lambda cache: cache.write(prompts, made), "writing embeddings")
        for prompt in prompts:
            self._coming.pop(prompt.id).set_result(None)
        self._on_done(len(prompts))

    def _on_done(self, count: int) -> None:
        """`count` prompts are encoded, or have failed."""
        if count:
            done, requested = self._counts
            self._counts = done + count, requested
            self._show_progress()

    def _show_progress(self) -> None:
        if self._coming:
            self._show("encoding prompts {:,} of {:,}".format(*self._counts))
        else:
            self._counts = 0, 0
            self._show("")


def _files(prompt: Prompt) -> tuple[bytes, ...] | UserError:
    """Contents of a prompt's reference images, or the error if one is unreadable."""
    try:
        return contents(prompt)
    except UserError as error:
        return error
