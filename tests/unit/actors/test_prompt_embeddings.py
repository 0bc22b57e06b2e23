"""Which prompts the encoders are asked for, how often, and what is left when one is lost."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.dispatch.prompt_embeddings import PromptEmbeddings
from actors.world import Tasks
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError, UserError, WorkerGone
from solrl_ray.prompts.embedding_cache import embedding_digest
from solrl_ray.prompts.prompt_set import negative_prompt, prompt_id, read_prompts
from solrl_ray.records import Prompt, PromptEmbedding
from tests.simulated import virtual_clock
from tests.simulated.faults import Fault
from tests.simulated.memory_disk import MemoryDisk
from tests.simulated.world import Ref, SimulatedWorld
from tests.support.documents import ROOT
from tests.support.editing import write_prompts

FOLDER = "/run/embeddings"
SECONDS = 10.0
"""An encoder's, for each prompt."""


def prompts(ids: str) -> list[Prompt]:
    return [Prompt(id=key, text=f"a picture of {key}") for key in ids]


def embedding(prompt: Prompt) -> PromptEmbedding:
    tensors = {"prompt_embeds": torch.full((4,), float(sum(prompt.id.encode())))}
    return PromptEmbedding(prompt_id=prompt.id, tensors=tensors, digest=embedding_digest(tensors))


GUIDED = ("evaluation.cfg={scale: 4, negative_prompt: dull}",)


class Encoder:
    """Answers as an encoder does, and notes what it was asked for."""

    def __init__(self) -> None:
        self.identity = {"device": "cpu/1"}
        self.asked: list[str] = []
        self.files: list[tuple[bytes, ...]] = []
        self.left = 0

    def start(self) -> dict[str, str]:
        return self.identity

    def embed(self, wanted: Sequence[Prompt], files: Sequence[tuple[bytes, ...]] = ()) -> list[PromptEmbedding]:
        self.asked.append("".join(prompt.id for prompt in wanted))
        self.files.extend(files)
        return [embedding(prompt) for prompt in wanted]

    def leave(self) -> None:
        self.left += 1


class World(SimulatedWorld):
    """Whose calls of encoders take a stated time."""

    def __init__(self, disk: MemoryDisk, faults: Sequence[Fault]) -> None:
        super().__init__(lambda role, name: Encoder(), disk, faults=faults)
        self._random = Fixed()


class Fixed:
    """In the place of chance: each call takes the longest time that there is."""

    def uniform(self, least: float, most: float) -> float:
        return 0.0 if most < 1.0 else SECONDS

    def choice(self, some: Sequence[Any]) -> Any:
        return some[0]


class Scene:
    def __init__(self, tasks: Tasks, disk: MemoryDisk, config: Config, faults: Sequence[Fault]) -> None:
        self.world = World(disk, faults)
        self.said: list[str] = []
        self.lost: list[str] = []
        self.successor = False
        self.embeddings = PromptEmbeddings(
            config, disk.path(FOLDER), self.world, tasks, show=self.said.append, lost=self._lost
        )

    def _lost(self, name: str, actor: Any, error: WorkerGone) -> bool:
        self.lost.append(f"{name}: {error}")
        return self.successor

    def join(self, *names: str) -> None:
        for name in names:
            self.embeddings.join(name, self.world.text_encoder(name))

    def player(self, name: str) -> Encoder:
        (found,) = [actor.player for actor in self.world.actors if actor.name == name]
        assert isinstance(found, Encoder)
        return found

    @property
    def asked(self) -> str:
        """All prompts that were asked for since the last time."""
        found = "".join(each for actor in self.world.actors for each in actor.player.asked)
        for actor in self.world.actors:
            actor.player.asked = []
        return "".join(sorted(found))


def config(*overrides: str) -> Config:
    return load([ROOT / "configs" / "demo.yaml"], overrides)


def played(
    play: Callable[[Scene], Coroutine[Any, Any, None]],
    *overrides: str,
    faults: Sequence[Fault] = (),
    encoders: int = 1,
    disk: MemoryDisk | None = None,
) -> None:
    async def scene() -> None:
        async with Tasks() as tasks:
            this = Scene(tasks, disk or MemoryDisk(), config(*overrides), faults)
            this.join(*(f"encoder-{number}" for number in range(encoders)))
            await play(this)

    virtual_clock.run(scene())


def value(reference: Any) -> PromptEmbedding:
    assert isinstance(reference, Ref)
    found: PromptEmbedding = reference.value
    return found


def test_a_prompt_is_encoded_once_and_comes_back_as_it_was_made() -> None:
    async def play(scene: Scene) -> None:
        found = await scene.embeddings.of(prompts("cabc"))
        assert list(found) == ["c", "a", "b"]
        for prompt in prompts("abc"):
            made = value(found[prompt.id])
            assert (made.prompt_id, made.digest) == (prompt.id, embedding(prompt).digest)
            assert torch.equal(made.tensors["prompt_embeds"], embedding(prompt).tensors["prompt_embeds"])
        assert scene.asked == "abc"
        again = await scene.embeddings.of(prompts("bd"))
        assert again["b"] is found["b"]  # still one copy
        assert scene.asked == "d"
        assert list(await scene.embeddings.of(prompts("ad"))) == ["a", "d"]
        assert value(await scene.embeddings.one(prompts("c")[0])).prompt_id == "c"
        assert scene.asked == ""  # what was freed is on the disk

    played(play)


def test_the_negative_prompt_is_encoded_once_and_comes_with_every_embedding_that_is_guided() -> None:
    """Training is not guided, evaluations are."""
    negative = negative_prompt(config(*GUIDED).evaluated_model)
    assert negative
    assert negative.id == prompt_id("dull")

    async def play(scene: Scene) -> None:
        model = config(*GUIDED).evaluated_model
        plain = await scene.embeddings.of(prompts("ab"))
        assert value(plain["a"]).tensors.keys() == {"prompt_embeds"}
        assert sorted(scene.asked) == sorted(f"ab{negative.id}")
        for reference in (
            (await scene.embeddings.of(prompts("cb"), model))["b"],
            await scene.embeddings.one(prompts("b")[0], model),
            await scene.embeddings.probe(prompts("b")[0]),
        ):
            found = value(reference)
            assert found.digest == embedding(prompts("b")[0]).against(embedding(negative)).digest
            assert torch.equal(found.tensors["negative_prompt_embeds"], embedding(negative).tensors["prompt_embeds"])
        assert scene.asked == "c"

    played(play, *GUIDED)


def test_what_was_prefetched_outlives_an_evaluation() -> None:
    async def play(scene: Scene) -> None:
        await scene.embeddings.prefetch(prompts("ab"))
        ahead = {key: scene.embeddings._held[key, None] for key in "ab"}
        for _ in range(2):
            evaluated = await scene.embeddings.of(prompts("cdea"), scene.embeddings._evaluated)
            assert evaluated["a"] is ahead["a"]  # neither is guided: still one copy
        assert await scene.embeddings.of(prompts("ba")) == ahead
        assert {key for key, _ in scene.embeddings._held} == set("ab")  # and the evaluation's are freed with it

    played(play)


def test_an_encoder_gets_the_files_of_references_which_the_negative_prompt_sees_too(tmp_path: Path) -> None:
    first, second = read_prompts(str(write_prompts(tmp_path / "p.jsonl", ["a", "a"], 8)))
    model = config(*GUIDED).evaluated_model
    against = [negative_prompt(model, prompt.references) for prompt in (first, second)]
    contents = [Path(prompt.references[0].path).read_bytes() for prompt in (first, second)]

    async def play(scene: Scene) -> None:
        # Ahead of time too: all of them, so that `of` need not wait.
        assert await scene.embeddings.encode([first, second]) == 4
        found = await scene.embeddings.of([first, second], model)
        for prompt, negative in zip((first, second), against, strict=True):
            assert negative
            assert value(found[prompt.id]).digest == embedding(prompt).against(embedding(negative)).digest
        assert sorted(scene.player("encoder-0").files) == sorted((content,) for content in contents * 2)

    played(play, *GUIDED, "model.references=1")


@pytest.mark.parametrize("overrides", [(), ("model.cfg={scale: 4, negative_prompt: dull}",)])
def test_what_earlier_iterations_held_is_released(overrides: tuple[str, ...]) -> None:
    """Ray keeps a value as long as somebody has its reference."""

    async def play(scene: Scene) -> None:
        old = [weakref.ref(reference) for reference in (await scene.embeddings.of(prompts("ab"))).values()]
        for ids in ("bc", "cd", "ef"):
            await scene.embeddings.of(prompts(ids))
        alone = weakref.ref(await scene.embeddings.one(prompts("z")[0]))  # only its caller keeps it
        assert [each() for each in (*old, alone)] == [None] * 3

    played(play, *overrides)


def test_evaluations_that_are_not_guided_as_samples_are_get_embeddings_of_their_own() -> None:
    """The references that iterations hold are against another negative prompt, or against none."""
    cfg = ("model.cfg={scale: 4, negative_prompt: dull}", "evaluation.cfg={scale: 4, negative_prompt: grey}")
    negative = {text: Prompt(id=prompt_id(text), text=text) for text in ("dull", "grey")}

    async def play(scene: Scene) -> None:
        model = config(*cfg).evaluated_model
        for guidance, text in ((None, "dull"), (model, "grey"), (None, "dull")):
            found = (await scene.embeddings.of(prompts("a"), guidance))["a"]
            expected = embedding(prompts("a")[0]).against(embedding(negative[text]))
            assert value(found).digest == expected.digest
            assert value(await scene.embeddings.one(prompts("a")[0], guidance)).digest == expected.digest

    played(play, *cfg)


def test_a_later_run_in_the_folder_encodes_only_what_is_missing() -> None:
    disk = MemoryDisk()

    async def first(scene: Scene) -> None:
        assert await scene.embeddings.encode(prompts("abc")) == 3

    async def second(scene: Scene) -> None:
        assert await scene.embeddings.encode(prompts("abcd")) == 1
        assert scene.asked == "d"

    played(first, disk=disk)
    played(second, disk=disk)


def test_encoders_share_the_work_as_each_gets_done() -> None:
    async def play(scene: Scene) -> None:
        await scene.embeddings.started.wait()
        began = scene.world.now()
        assert await scene.embeddings.encode(prompts("abcdefghij")) == 10
        # Ten calls by four encoders: three rounds, and nobody waits beside a free one.
        assert scene.world.now() - began == pytest.approx(3 * SECONDS, abs=0.5)
        assert sorted(len(scene.player(f"encoder-{n}").asked) for n in range(4)) == [2, 2, 3, 3]

    played(play, encoders=4)


def test_prompts_go_in_micro_batches() -> None:
    async def play(scene: Scene) -> None:
        await scene.embeddings.encode(prompts("abcdefghijk"))
        assert scene.player("encoder-0").asked == ["abcd", "efgh", "ijk"]

    played(play, "fleet.encoders.micro_batch=4")


def test_progress_counts_all_that_was_asked_for() -> None:
    async def play(scene: Scene) -> None:
        ahead = asyncio.ensure_future(scene.embeddings.prefetch(prompts("abc")))
        await asyncio.sleep(0)
        await scene.embeddings.of(prompts("bd"))
        await ahead
        await asyncio.sleep(100.0)
        assert "encoding prompts 2 of 4" in scene.said
        assert scene.said[-1] == ""
        assert scene.asked == "abcd"  # b once, though it was asked for twice at a time
        await scene.embeddings.of(prompts("e"))
        assert scene.said[-2:] == ["encoding prompts 0 of 1", ""]

    played(play)


def test_what_a_lost_encoder_had_goes_to_another() -> None:
    async def play(scene: Scene) -> None:
        found = await scene.embeddings.of(prompts("abcdef"))
        assert [value(each).prompt_id for each in found.values()] == list("abcdef")
        (lost,) = scene.lost
        assert "the worker died" in lost

    # Calls 1 and 2 are starts.
    played(play, encoders=2, faults=[Fault("text_encoder", 3, "dies before")])


@pytest.mark.parametrize("successor", [True, False])
def test_without_an_encoder_a_run_waits_for_the_next_or_ends(successor: bool) -> None:
    async def play(scene: Scene) -> None:
        scene.successor = successor
        waiting = asyncio.ensure_future(scene.embeddings.of(prompts("ab")))
        await asyncio.sleep(100.0)
        assert scene.lost
        assert not waiting.done()
        scene.join("encoder-1")
        assert list(await waiting) == ["a", "b"]

    faults = [Fault("text_encoder", 2, "dies before")]
    if successor:
        played(play, faults=faults)
    else:
        with pytest.raises(RunError, match=r"^encoding 1 prompt by encoder-0 .* failed: .*the worker died$"):
            played(play, faults=faults)


def test_a_hanging_encoder_is_named_with_a_deadline_that_counts_its_prompts() -> None:
    async def play(scene: Scene) -> None:
        await scene.embeddings.of(prompts("abc"))

    said = (
        r"^encoding 3 prompts by encoder-0 \(fleet\.deadlines\.encode\) failed: no answer within its deadline of 60 s$"
    )
    with pytest.raises(RunError, match=said):
        played(
            play,
            "fleet={encoders: {micro_batch: 4}, deadlines: {encode: 20}}",
            faults=[Fault("text_encoder", 2, "hangs")],
        )


def test_a_deadline_also_counts_the_reference_pictures_of_prompts(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        await scene.embeddings.of(read_prompts(str(write_prompts(tmp_path / "p.jsonl", ["a", "b"], 8))))

    with pytest.raises(RunError, match=r"^encoding 2 prompts .* failed: no answer within its deadline of 120 s$"):
        played(
            play,
            "model.references=2",
            "fleet={encoders: {micro_batch: 4}, deadlines: {encode: 20}}",
            faults=[Fault("text_encoder", 2, "hangs")],
        )


def test_an_encoder_that_does_not_start_is_named() -> None:
    async def play(scene: Scene) -> None:
        await scene.embeddings.started.wait()

    key = r"\(fleet\.deadlines\.start; raise it if the machine is slow or busy\)"
    with pytest.raises(
        RunError, match=rf"^the start of encoder-0 {key} failed: no answer within its deadline of 180 s$"
    ):
        played(play, faults=[Fault("text_encoder", 1, "hangs")])


def test_encoders_must_agree_on_what_fixes_an_embedding() -> None:
    async def play(scene: Scene) -> None:
        await scene.embeddings.started.wait()
        scene.join("encoder-1")
        scene.player("encoder-1").identity = {"device": "cuda/NVIDIA H100"}
        await asyncio.sleep(100.0)

    with pytest.raises(RunError, match=r"encoder-1 .* encoder-0: its device is cuda/NVIDIA H100, not cpu/1"):
        played(play)


def test_text_encoders_leave_and_come_back_with_the_time_to_load_them() -> None:
    async def play(scene: Scene) -> None:
        assert await scene.embeddings.encode([]) == 0
        assert scene.player("encoder-0").left == 1  # though there was nothing to encode
        await scene.embeddings.of(prompts("a"))  # in 10 s, of which 5 are for the prompt
        assert scene.player("encoder-0").left == 2
        await scene.embeddings.of(prompts("a"))
        assert scene.player("encoder-0").left == 2

    cards = "fleet={placement: colocated, learners: {num_gpus: 1}, encoders: {micro_batch: 1}, deadlines: {encode: 5}}"
    played(play, cards, "model.dtype=bfloat16")

    async def stays(scene: Scene) -> None:
        await scene.embeddings.encode(prompts("a"))

    with pytest.raises(RunError, match="deadline of 5 s"):
        played(stays, "fleet.deadlines.encode=5")


def test_other_iterations_are_encoded_together_with_one_that_is_missing() -> None:
    async def play(scene: Scene) -> None:
        assert await scene.embeddings.encode(prompts("ab"), further=prompts("bcd")) == 4
        assert await scene.embeddings.encode(prompts("cd"), further=prompts("ef")) == 0
        assert scene.asked == "abcd"

    played(play)


def test_nothing_is_encoded_early_that_would_fill_the_disk() -> None:
    async def play(scene: Scene) -> None:
        await scene.embeddings.encode(prompts("a"))
        assert await scene.embeddings.encode(prompts("b"), further=prompts("cd")) == 1
        assert scene.asked == "ab"

    played(play, "checkpoints.min_free_gb=1.0e9")


def test_a_full_disk_ends_the_run_with_its_folder_and_what_to_do() -> None:
    disk = MemoryDisk()

    async def play(scene: Scene) -> None:
        await scene.embeddings.encode(prompts("ab"))
        await scene.embeddings.encode(prompts("cdef"))

    said = rf"^embeddings of prompts cannot be written to {FOLDER}: No space left on device; make room there and"
    with pytest.raises(RunError, match=said):
        played(play, disk=disk, faults=[Fault("disk", 12, "is full")])
    kept = sum(path.name.endswith(".safetensors") for path in disk.path(FOLDER).iterdir())
    assert 0 < kept < 6

    async def resumed(scene: Scene) -> None:
        assert await scene.embeddings.encode(prompts("abcdef")) == 6 - kept

    played(resumed, disk=disk)


def test_a_damaged_embedding_is_encoded_again() -> None:
    disk = MemoryDisk()

    async def play(scene: Scene) -> None:
        await scene.embeddings.encode(prompts("ab"))
        for file in disk.path(FOLDER).iterdir():
            scene.world._is_blocking = True
            with file.open("wb") as opened:
                opened.write(b"torn")
            scene.world._is_blocking = False
        found = await scene.embeddings.of(prompts("ab"))
        assert [value(each).digest for each in found.values()] == [embedding(p).digest for p in prompts("ab")]
        assert scene.asked == "aabb"

    played(play, disk=disk)


EDITS = (*GUIDED, "model.references=1")


def test_one_picture_under_two_names_and_a_prompt_as_the_negative_one(tmp_path: Path) -> None:
    file = write_prompts(tmp_path / "p.jsonl", ["a", "b", "dull"], 8)
    for copy in ("p-1-0.png", "p-2-0.png"):
        (tmp_path / copy).write_bytes((tmp_path / "p-0-0.png").read_bytes())
    edits = read_prompts(str(file))

    async def play(scene: Scene) -> None:
        found = await scene.embeddings.of(edits, config(*EDITS).evaluated_model)
        assert list(found) == [prompt.id for prompt in edits]
        assert all("negative_prompt_embeds" in value(each).tensors for each in found.values())
        assert scene.asked == "".join(sorted("".join(prompt.id for prompt in edits)))

    played(play, *EDITS)

    async def without(scene: Scene) -> None:
        same = [Prompt(id=prompt_id(text), text=text) for text in ("bright", "dull")]
        assert len(await scene.embeddings.of(same, config(*GUIDED).evaluated_model)) == 2

    played(without, *GUIDED)


def test_who_asks_for_a_picture_that_is_gone_is_told_and_others_go_on(tmp_path: Path) -> None:
    good, bad = read_prompts(str(write_prompts(tmp_path / "p.jsonl", ["good", "bad"], 8)))
    Path(bad.references[0].path).unlink()

    async def play(scene: Scene) -> None:
        others = asyncio.ensure_future(scene.embeddings.of([good]))
        for _ in range(2):
            with pytest.raises(UserError, match=r"^the prompt 'bad' has .*p-1-0\.png.* cannot be read"):
                await scene.embeddings.of([bad])
        assert list(await others) == [good.id]
        assert scene.said[-1] == ""

    played(play, *EDITS, "fleet.encoders.micro_batch=4")
