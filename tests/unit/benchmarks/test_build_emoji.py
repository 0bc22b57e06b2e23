"""The emoji world: what is drawn, what is said of it, and that its networks are trained in parts."""

from __future__ import annotations

import itertools
import json
import runpy
import time
from dataclasses import replace
from pathlib import Path

import build_emoji
import draw_emoji
import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from emoji_assets import captions, colours, drawings, judgement, networks, objectives, pictures
from emoji_assets.captions import Parts
from emoji_assets.drawings import Drawing
from emoji_assets.fit import EVERY, Fit, Stage
from emoji_assets.objectives import Latents

from solrl_ray.config.checks import check
from solrl_ray.config.loading import load
from solrl_ray.rewards.callables import import_callable
from tests.support.examples import EXAMPLES

CPU = torch.device("cpu")
NAMES = {
    "1F34E": ("red apple", 0, 4, 42),
    "1F34F": ("green apple", 1, 4, 42),
    "1F1EB-1F1F7": ("flag: France", 2, 9, 98),
    "1F44B": ("waving hand", 3, 1, 16),
}


def package(folder: Path, icons: dict[str, str], codes: dict[str, str]) -> Path:
    folder.mkdir(parents=True)
    content = {"width": 8, "height": 8, "icons": {name: {"body": body} for name, body in icons.items()}}
    (folder / "icons.json").write_text(json.dumps(content))
    (folder / "chars.json").write_text(json.dumps(codes))
    info = {"name": "Small", "author": {"name": "Ann", "url": "https://example.org"}}
    info["license"] = {"title": "MIT", "url": "https://example.org/licence"}
    (folder / "info.json").write_text(json.dumps(info))
    return folder


def names(folder: Path) -> Path:
    for part in ("en/shortcodes", "meta"):
        (folder / part).mkdir(parents=True)
    emoji = [
        {"hexcode": code, "label": label, "group": group, "subgroup": subgroup, "tags": ["fruit", label.split()[0]]}
        for code, (label, _, group, subgroup) in NAMES.items()
    ]
    emoji[-1]["skins"] = [{"hexcode": f"1F44B-1F3F{'BCDEF'[tone - 1]}", "tone": tone} for tone in range(1, 6)]
    (folder / "en" / "data.json").write_text(json.dumps(emoji))
    (folder / "en" / "shortcodes" / "some.json").write_text(json.dumps({"1F34F": "sour_apple"}))
    groups = {"subgroups": {"42": "food-fruit", "98": "country-flag", "16": "hand-fingers-open"}}
    (folder / "meta" / "groups.json").write_text(json.dumps(groups))
    (folder / "package.json").write_text(json.dumps({"license": "MIT"}))
    return folder


def test_icons_of_packages_become_drawings_with_the_names_of_their_code_points(tmp_path: Path) -> None:
    square = '<path d="M0 0h8v8H0z"/>'
    one = package(
        tmp_path / "one", {"apple": square, "wave": square, "logo": square}, {"1f34e": "apple", "1f44b": "wave"}
    )
    two = package(tmp_path / "two", {"sourapple": square, "redApple": square}, {})
    found = drawings.collect({"flat": one, "blob": two}, names(tmp_path / "names"))
    assert [(each.name, each.style) for each in found] == [
        ("green apple", "blob"),
        ("red apple", "blob"),
        ("red apple", "flat"),
        ("waving hand", "flat"),
    ]
    assert found[0].category == "food fruit"
    assert 'viewBox="0 0 8 8"' in found[0].svg
    draw_emoji.save(found, tmp_path / "drawings.xz")
    assert sorted(map(str, drawings.read(tmp_path / "drawings.xz"))) == sorted(map(str, found))
    assert "Ann" in drawings.attribution({"flat": one}, tmp_path / "names")


def test_of_the_skin_tones_of_a_drawing_one_is_kept(tmp_path: Path) -> None:
    tones = {f"wave-{tone}": "<g/>" for tone in range(5)}
    codes = {f"1f44b-1f3f{'bcdef'[tone]}": f"wave-{tone}" for tone in range(5)}
    found = drawings.collect({"flat": package(tmp_path / "one", tones, codes)}, names(tmp_path / "names"))
    assert len(found) == 1
    assert found[0].tone in drawings.TONES


def test_every_word_of_a_held_out_name_is_in_names_that_are_not() -> None:
    colours_, things = ("red", "green", "blue", "black", "white"), ("apple", "heart", "car", "book", "cat")
    every = {f"{colour} {thing}": thing for colour in colours_ for thing in things} | {"lonely zebra": "animal"}
    held_out = drawings.choose_held_out(every, count=6)
    rest = {word for name in every if name not in held_out for word in drawings.words(name)}
    assert len(held_out) == 6
    assert all(set(drawings.words(name)) <= rest for name in held_out)
    assert "lonely zebra" not in held_out


@pytest.mark.parametrize(
    ("name", "category", "mirrors"),
    [("cat", "animal mammal", True), ("left arrow", "arrow", False), ("person facing right", "person", False)],
)
def test_only_what_shows_the_same_is_mirrored(name: str, category: str, mirrors: bool) -> None:
    drawing = Drawing(name=name, category=category, tags=(), style="flat", tone="", held_out=False, svg="")
    assert drawing.mirrors == mirrors


def test_colours_are_named_by_their_shares_of_what_is_drawn() -> None:
    picture = np.zeros((10, 10, 4), np.uint8)
    picture[:6] = (220, 45, 70, 255)
    picture[6:9] = (255, 205, 80, 255)
    picture[9, :5] = (30, 30, 30, 255)
    assert colours.dominant(picture) == ["red", "yellow"]
    assert colours.dominant(picture * 0) == []


def parts_of(count: int) -> list[Parts]:
    """Squares of three colours and three sizes in two styles."""
    found = []
    for number in range(count):
        colour, size, style = ("red", "green", "blue")[number % 3], ("small", "large")[number // 3 % 2], number // 6 % 2
        text = dict(name=f"{size} {colour} square", category="geometric", tags=("shape", colour), colours=(colour,))
        held_out = text["name"] == "small blue square"
        found.append(Parts(**text, style=("flat", "blob")[style], tone="", held_out=held_out, mirrors=True))
    return found


def data(folder: Path, count: int = 48) -> Path:
    folder.mkdir(parents=True)
    parts, drawn = parts_of(count), np.full((count, 32, 32, 3), 255, np.uint8)
    for picture, each in zip(drawn, parts, strict=True):
        edge = 4 if "large" in each.name else 10
        colour = [40 + 190 * (name in each.name) for name in ("red", "green", "blue")]
        picture[edge:-edge, edge:-edge] = colour
        if each.style == "blob":
            picture[14:18, 14:18] = 0
    np.save(folder / "pictures.npy", drawn)
    rows = [{field: getattr(each, field) for field in Parts.__dataclass_fields__} for each in parts]
    (folder / "captions.json").write_text(json.dumps(rows))
    return folder


def test_captions_say_the_style_where_they_state_that_they_do() -> None:
    generator = np.random.default_rng(1)
    drawn = [captions.draw(each, generator) for each in parts_of(6) for _ in range(50)]
    assert all(("style" in caption.text) == caption.says_style for caption in drawn)
    assert 0.6 < np.mean([caption.says_style for caption in drawn]) < 0.8


def test_prompts_of_held_out_concepts_are_in_one_file_and_the_others_in_another() -> None:
    known, held_out = (captions.prompts(parts_of(48), side, seed=1) for side in (False, True))
    assert held_out
    assert all("small blue square" in prompt for prompt in held_out)
    assert not any("small blue square" in prompt for prompt in known)


def test_real_pictures_of_a_prompt_are_those_of_its_style_if_it_says_one() -> None:
    shown = {
        prompt: [each.style for each in parts_of(12) if each.shows(prompt)]
        for prompt in ("large red square, flat style", "large red square", "large red square, other style")
    }
    assert list(shown.values()) == [["flat"], ["flat", "blob"], []]


def test_each_text_counts_alike_in_a_mean_cosine(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.tensor([[0.9, 0.0], [0.0, 0.1], [0.0, 0.3]])
    monkeypatch.setattr(judgement, "scores", lambda *_: table)
    groups = [torch.zeros(1, 3, 4, 4), torch.zeros(2, 3, 4, 4)]
    assert judgement.mean_cosine(None, None, groups, ["a", "b"], CPU) == pytest.approx((0.9 + 0.2) / 2)


def test_pairs_are_made_in_parts(tmp_path: Path) -> None:
    one, other = (
        build_emoji.Build(data(tmp_path / name / "data"), tmp_path / name, CPU, 0.05, networks.TINY) for name in "ab"
    )
    assert one._pairs(time.monotonic() - 1) is None
    whole = one._pairs(time.monotonic() + 600)
    assert whole is not None
    assert len(whole.noise) == 2 * 64
    (tmp_path / "b" / "state" / "pairs").mkdir()
    first = tmp_path / "b" / "state" / "pairs" / "000.pt"
    first.write_bytes((tmp_path / "a" / "state" / "pairs" / "000.pt").read_bytes())
    resumed = other._pairs(time.monotonic() + 600)
    assert resumed is not None
    assert torch.equal(resumed.latents, whole.latents)
    assert not torch.equal(whole.noise[:64], whole.noise[64:])


def test_no_picture_is_in_both_halves() -> None:
    parts = parts_of(48)
    first, second = (pictures.half(parts, side) for side in (False, True))
    assert sorted(first + second) == list(range(48))
    cells = [{(parts[row].name, parts[row].style) for row in rows} for rows in (first, second)]
    assert not cells[0] & cells[1]


def test_moving_a_picture_keeps_what_is_in_it() -> None:
    seen = torch.ones(16, 3, 48, 48)
    seen[:, :, 10:20, 10:30] = -1
    moved = pictures.moved(seen, torch.zeros(16, dtype=torch.bool), torch.Generator().manual_seed(1))
    assert (moved < 0).sum() == (seen < 0).sum()
    assert not torch.equal(moved, seen)


def fit(folder: Path, seconds: float) -> tuple[torch.nn.Linear, Fit]:
    torch.manual_seed(1)
    layer = torch.nn.Linear(4, 4)
    return layer, Fit(
        Stage(name="line", seconds=seconds, batch=8, lr=0.03, seed=1, averaging=0.9), {"a": layer}, folder, CPU
    )


def test_a_stage_that_was_stopped_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    monkeypatch.setattr("emoji_assets.fit.time.monotonic", lambda: next(seconds))  # each look takes one
    layer, first = fit(tmp_path, seconds=30)

    def loss(generator: torch.Generator) -> torch.Tensor:
        x = torch.randn(8, 4, generator=generator)
        return (layer(x) - x).square().mean()

    first.run(loss, until=next(seconds) + 11)
    assert (first.steps, first.spent, first.done) == (1 + 10 * EVERY, 10, False)
    stopped = first.loss
    layer, second = fit(tmp_path, seconds=30)
    assert (second.steps, second.spent, second.loss) == (first.steps, first.spent, stopped)
    second.run(loss, until=next(seconds) + 1000)
    assert (second.steps, second.spent, second.done) == (2 + 30 * EVERY, 30, True)
    assert second.loss < 0.2 * stopped
    again, third = fit(tmp_path, seconds=30)
    assert third.done
    assert torch.equal(again.weight, layer.weight)


def test_flow_matching_learns_to_draw_what_captions_say(tmp_path: Path) -> None:
    build = build_emoji.Build(data(tmp_path / "data"), tmp_path / "out", CPU, 1e-6, networks.TINY)
    levels = [{"red": -1.0, "green": 0.0, "blue": 1.0}[each.colours[0]] for each in build.world.parts]
    latents = torch.tensor(levels).view(-1, 1, 1, 1).expand(-1, 1, build.sizes.side**2, 16)
    parameters = [p for part in objectives.trainable(build.pipe).values() for p in part.parameters()]
    adamw, generator = torch.optim.AdamW(parameters, lr=2e-3), torch.Generator().manual_seed(0)
    for _ in range(100):
        objectives.flow_loss(build.pipe, build.world, Latents(latents), 16, build.empty, generator).backward()
        adamw.step()
        adamw.zero_grad()
    texts = ["large red square", "large green square", "large blue square"]
    clip, t5 = (pictures.token_ids(each, texts, CPU) for each in build.tokenizers)
    noise = torch.randn(3, *latents.shape[2:], generator=generator)
    made = objectives.sample(build.pipe, clip, t5, noise, steps=10)
    torch.testing.assert_close(made.mean(dim=(1, 2)), torch.tensor([-1.0, 0.0, 1.0]), atol=0.35, rtol=0)
    guided = objectives.sample(build.pipe, clip, t5, noise, steps=10, guidance=2.0, empty=build.empty)
    assert guided[0].mean() < made[0].mean()  # further from what all captions have in common
    assert guided[2].mean() > made[2].mean()


def test_a_bad_autoencoder_ends_the_command_before_anything_is_trained_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("emoji_assets.fit.EVERY", 2)
    short = replace(build_emoji.AUTOENCODER, seconds=1e-3)
    monkeypatch.setattr(build_emoji, "AUTOENCODER", short)
    arguments = [str(data(tmp_path / "data")), str(tmp_path / "out"), "--device", "cpu", "--tiny"]
    monkeypatch.setattr("sys.argv", ["build_emoji.py", *arguments])
    assert build_emoji.main() == 1
    assert "the autoencoder restores known images with" in capsys.readouterr().err
    record = json.loads((tmp_path / "out" / "world" / "build.json").read_text())
    assert (record["done"], record["autoencoder"]["done"], record["reward"]["steps"]) == (False, True, 0)
    assert record["known_restored"]["psnr_db"] < build_emoji.LEAST_PSNR


@pytest.mark.slow
def test_all_stages_are_trained_in_parts_to_what_the_example_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures_, out = data(tmp_path / "data"), tmp_path / "emoji"
    # So short that each stage is done after the fewest steps; without time left only the first is trained.
    assert not build_emoji.Build(pictures_, out, CPU, 1e-6, networks.TINY).run(time.monotonic())
    build = build_emoji.Build(pictures_, out, CPU, 1e-6, networks.TINY)
    assert (build.fits["autoencoder"].done, build.fits["reward"].done) == (True, False)
    assert all(stage(time.monotonic() + 3600) for stage in (build.autoencoder, build.reward, build.judge))
    build = build_emoji.Build(pictures_, out, CPU, 1e-6, networks.TINY)
    assert (build.fits["judge"].done, "flow" in build.fits) == (True, False)
    assert build.run(time.monotonic() + 3600)
    build.write(True)
    world = out / "world"
    of = {name: (world / "prompts" / f"{name}.txt").read_text().splitlines() for name in ("train", "heldout", "unseen")}
    assert all(of.values())
    assert not set(of["train"]) & set(of["heldout"])
    assert {name for name, prompts in of.items() if any("small blue square" in each for each in prompts)} == {"unseen"}
    pipe = FluxPipeline.from_pretrained(world / "pipeline", torch_dtype=torch.float32)
    made = pipe(
        "large red square", height=32, width=32, num_inference_steps=2, max_sequence_length=12, output_type="pt"
    ).images
    assert made.shape == (1, 3, 32, 32)
    monkeypatch.chdir(tmp_path)
    for part in ("style.yaml", "judge.yaml"):
        shape = ["model.resolution=32", "model.max_sequence_length=12", "model.dtype=float32"]
        config = load([EXAMPLES / "emoji" / "emoji.yaml", EXAMPLES / "emoji" / part], shape)
        function = import_callable(str(EXAMPLES.parent / config.rewards[0].kind), "rewards.0.kind")
        scored, again = (
            function(made.float(), ["large red square"]),
            function(made.float(), ["large red square, blob style"]),
        )
        assert torch.equal(scored, again)
        plain = load([EXAMPLES / "emoji" / "emoji.yaml"], shape)
        check(plain)
    record = json.loads((world / "build.json").read_text())
    assert record["done"]
    assert record["rectification"]["done"]
    for part in ("model", "real"):
        assert {"reward", "judge"} == record[part].keys() == record["look"][part].keys()
    assert build_emoji.configuration(world)["model"]["resolution"] == 32
    assert record["known_restored"]["psnr_db"] > 0
    assert {"known.png", "held_out.png"} == {file.name for file in (world / "pictures").iterdir()}


class Told:
    """In place of a CLIP: the cosines of each text, whatever the picture."""

    def cosine(self, images: torch.Tensor, texts: list[str]) -> torch.Tensor:
        known = {"apple, blob style": 0.5, "apple, noto style": 0.2, "bus, flat style": 0.6}
        return torch.tensor([known.get(text, 0.0) for text in texts])


def test_a_look_is_the_cosine_in_the_style_and_how_far_it_is_above_the_others_mean() -> None:
    found = runpy.run_path(str(EXAMPLES / "emoji" / "style.py"))
    assert set(found["STYLES"]) == set(drawings.STYLES)
    looks = found["look"](Told(), torch.zeros(3, 3, 4, 4), ["apple", "bus, flat style", "apple, noto style"])
    assert looks.tolist() == pytest.approx([0.5 + (0.5 - 0.2 / 6), 0 + (0 - 0.6 / 6), 0.5 + (0.5 - 0.2 / 6)])
