"""The moving world: what a clip shows and what is said of it, and that its model is trained in parts."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path

import build_video_world
import pytest
import torch
from build_video_world import Build
from emoji_assets import fit
from video_assets import clips, networks, scores

from solrl_ray.config.checks import check
from solrl_ray.config.loading import load
from solrl_ray.testbed.world import RELATIONS, parse

DEMO = Path(__file__).parents[3] / "configs" / "demo.yaml"
LEFT, RIGHT, ABOVE, BELOW = range(4)


def clip(first: int, last: int, *, large: tuple[int, int] = (0, 0)) -> torch.Tensor:
    """A red circle that turns about a blue square, on black."""
    return torch.tensor([[2, large[0], 0, 0, first, large[1], 2, 1, 0, last]])


def drawn(rows: torch.Tensor) -> torch.Tensor:
    return clips.render_clips(rows, torch.Generator().manual_seed(1))


def position(video: torch.Tensor, frame: int) -> tuple[float, float]:
    """Of the red circle less the blue square, in pixels, x and y."""
    red, blue = video[0, 0, frame], video[0, 2, frame]
    line = torch.arange(32.0)
    centres = [
        ((part.sum(0) @ line / part.sum()).item(), (part.sum(1) @ line / part.sum()).item())
        for part in ((red - blue).clamp(min=0), (blue - red).clamp(min=0))
    ]
    return centres[0][0] - centres[1][0], centres[0][1] - centres[1][1]


@pytest.mark.parametrize(
    ("first", "last", "middle"),
    [
        (LEFT, ABOVE, (-1, -1)),
        (ABOVE, RIGHT, (1, -1)),
        (RIGHT, BELOW, (1, 1)),
        (LEFT, RIGHT, (0, -1)),
        (RIGHT, LEFT, (0, 1)),
    ],
)
def test_a_clip_turns_from_one_relation_to_the_other_the_shorter_way_and_clockwise_by_half(
    first: int, last: int, middle: tuple[int, int]
) -> None:
    video = drawn(clip(first, last))
    assert video.shape == (1, 3, clips.FRAMES, 32, 32)
    directions = list(RELATIONS.values())
    for frame, wanted in ((0, directions[first]), (4, middle), (8, directions[last])):
        found = position(video, frame)
        length = math.hypot(*wanted)
        assert math.hypot(*found) == pytest.approx(2 * clips.DISTANCE * 16, abs=2.5)
        assert (found[0] * wanted[0] + found[1] * wanted[1]) / math.hypot(*found) / length > 0.97


def test_a_caption_says_both_ends_and_clips_of_one_meaning_look_the_same() -> None:
    rows = clips.draw(64, torch.Generator().manual_seed(3))
    for row in rows:
        first, last = (parse(text).fields for text in scores.ends(clips.caption(row)))
        assert first == tuple(row[:-1].tolist())
        assert last == (*first[:4], int(row[-1]), *first[5:])
    assert (rows[:, 4] != rows[:, -1]).all()
    other = torch.tensor([[2, 0, 2, 1, RIGHT, 0, 0, 0, 0, BELOW]])  # the blue square, seen from the red circle
    assert clips.meaning(clip(LEFT, ABOVE)) == clips.meaning(other)
    assert clips.meaning(clip(LEFT, BELOW)) != clips.meaning(other)
    with pytest.raises(ValueError, match="no caption of the moving world"):
        scores.ends("a small red circle on black")


def test_the_reward_is_that_of_the_right_clip_and_half_of_it_is_its_end() -> None:
    rows = clips.draw(32, torch.Generator().manual_seed(4))
    said = [clips.caption(row) for row in rows]
    videos = drawn(rows)
    right = scores.as_told(videos, said)
    assert right.shape == (32,)
    assert right.mean() > 0.9
    assert scores.as_told(videos.roll(1, 0), said).mean() < 0.3
    still = videos[:, :, :1].expand_as(videos)  # the end is as the beginning
    assert 0.4 < scores.as_told(still, said).mean() < right.mean() - 0.1
    assert scores.words_of_both(videos[:2], said[:2]).mean() > 0.9


def test_the_autoencoder_tells_white_from_grey_after_a_hundred_steps() -> None:
    torch.manual_seed(1)
    vae = networks.pipeline(networks.Sizes(autoencoder=8, channels=8)).vae
    levels = torch.tensor([-0.95, 0.0, 0.95])
    plain = levels.view(3, 1, 1, 1, 1).expand(3, 3, 1, 16, 16)
    adamw, generator = torch.optim.AdamW(vae.parameters(), lr=5e-4), torch.Generator().manual_seed(2)
    for _ in range(100):
        networks.restored_loss(vae, plain, generator).backward()
        adamw.step()
        adamw.zero_grad()
    restored = vae.decode(vae.encode(plain).latent_dist.mean).sample.mean(dim=(1, 2, 3, 4))
    torch.testing.assert_close(restored, levels, atol=0.15, rtol=0)


def test_ids_by_table_are_those_of_the_tokenizer() -> None:
    pipe = networks.pipeline(networks.TINY)
    rows = clips.draw(256, torch.Generator().manual_seed(5))
    said = networks.tokens(pipe, [clips.caption(row) for row in rows])
    assert torch.equal(networks.CaptionIds(pipe, torch.device("cpu"))(rows), said)


def test_a_bad_autoencoder_ends_the_command_before_anything_is_trained_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fit, "EVERY", 2)
    short = replace(build_video_world.AUTOENCODER, seconds=1e-3)
    monkeypatch.setattr(build_video_world, "AUTOENCODER", short)
    monkeypatch.setattr("sys.argv", ["build_video_world.py", str(tmp_path), "--device", "cpu", "--tiny"])
    assert build_video_world.main() == 1
    assert "clips restored by the autoencoder have reward" in capsys.readouterr().err
    record = json.loads((tmp_path / "world" / "build.json").read_text())
    assert (record["done"], record["autoencoder"]["done"], "flow" in record) == (False, True, False)
    assert record["restored"]["reward"] < build_video_world.LEAST * record["real"]["reward"]


@pytest.mark.slow
def test_the_model_is_trained_in_parts_to_what_a_run_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "EVERY", 4)
    device = torch.device("cpu")
    part = Build(tmp_path, device, 1e-4, networks.TINY)
    assert not part.run(time.monotonic())  # time is over: one look at the clock, and the autoencoder is there
    assert part.fits["autoencoder"].steps == fit.EVERY + 1
    build = Build(tmp_path, device, 1e-4, networks.TINY)
    assert build.run(math.inf)
    build.write(True)
    record = json.loads((tmp_path / "world" / "build.json").read_text())
    assert record["done"]
    assert record["autoencoder"]["steps"] == fit.EVERY + 1
    assert record["real"]["reward"] > 0.9
    config = load([DEMO, tmp_path / "world" / "video.yaml"], [])
    check(config)
    assert config.model.frames == clips.FRAMES
    train, heldout = (
        (tmp_path / "world" / "prompts" / f"{name}.txt").read_text().splitlines() for name in ("train", "heldout")
    )
    assert not set(train) & set(heldout)
    ids = networks.tokens(build.pipe, heldout)
    stock, _ = build.pipe.encode_prompt(
        heldout[:4], do_classifier_free_guidance=False, device=device, max_sequence_length=networks.LENGTH
    )
    assert (ids != build.pipe.tokenizer.unk_token_id).all()
    assert torch.equal(networks.encode_texts(build.pipe, ids[:4]), stock)
