"""What a plan says of videos' time, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from solrl_ray.config.loading import load
from solrl_ray.errors import UserError
from solrl_ray.plan.arithmetic import ModelFacts, describe
from solrl_ray.plan.prices import Cluster, Priced, price_list, priced

CONFIGS = Path(__file__).parents[3] / "configs"
GIVEN = (
    "prompts={train: train.txt, heldout: heldout.txt}",
    "rewards=[{kind: clipscore, path: some/clip, frames: {count: 4}}]",
    "rollout={pool: 8, keep: 2, explore: {steps: 6, micro_batch: 1, precision: auto}}",
    "rollout.regenerate={steps: 10, micro_batch: 1}",
    "rollout.preview.prune=null",
)
WAN = ModelFacts(
    latent_shape=(16, 13, 60, 104),
    parameters=1_400_000_000,
    lora_modules=240,
    lora_parameters=23_600_000,
    packed_bytes=0,
    tokens=20_280,
)
VIDEO_PRICES = """
gpu: a card
fastest: fp8
models:
  - family: wan
    parameters: 1.4e9
    resolution: [480, 832]
    frames: 49
    tokens: 20280
    steps:
      bf16: {ms: 300, measured: true, source: here}
      fp8: {ms: 250, measured: true, source: here}
    decode_and_reward: {ms: 2000, measured: true, source: here}
    forward: {ms: 400, measured: true, source: here}
    backward: {ms: 900, measured: true, source: here}
    publication: {ms: 500, measured: false, source: assumed}
    load: {ms: 100, measured: false, source: assumed}
    checkpoint: {ms: 100, measured: false, source: assumed}
"""


def video_stages(tmp_path: Path, *overrides: str, model: str = "wan21_1_3b", facts: ModelFacts = WAN) -> Priced:
    (tmp_path / "card.yaml").write_text(VIDEO_PRICES)
    files = [CONFIGS / "methods/sol_rl_published.yaml", CONFIGS / f"models/{model}.yaml"]
    config = load(files, (*GIVEN, *overrides))
    return priced(describe(config, facts), price_list(str(tmp_path / "card.yaml")), Cluster(gpu="a card"))


def test_a_preview_of_a_video_pays_for_the_frames_that_it_decodes(tmp_path: Path) -> None:
    whole = video_stages(tmp_path)
    assert whole.stages.explore == pytest.approx(6 * 0.25 + 2.0)
    assert whole.figures["decode and reward"].measured
    few = video_stages(tmp_path, "rollout.preview.latent_frames=[0, 4, 8, 12]")
    assert few.stages.explore == pytest.approx(6 * 0.25 + 13 / 49 * 2.0)  # 1 frame, then 4 of each
    assert few.stages.regenerate == pytest.approx(2 * (10 * 0.3 + 2.0))  # samples are decoded whole
    decoded = few.figures["decode and reward"]
    assert (decoded.ms, decoded.measured) == (2000, False)
    assert decoded.source == "here; a preview decodes 13 of 49 frames and is counted with as much of it"


def test_an_unlisted_video_model_is_scaled_by_its_tokens_not_by_its_pixels(tmp_path: Path) -> None:
    # Of as many pixels another autoencoder makes half of the tokens. With twice the parameters it is 1.
    larger = replace(WAN, parameters=2_800_000_000, tokens=10_140)
    figures = video_stages(tmp_path, model="wan22_5b", facts=larger).figures
    assert figures["regeneration step (bf16)"].ms == pytest.approx(300 * 2 / 2)
    assert not figures["regeneration step (bf16)"].measured
    assert figures["decode and reward"].ms == pytest.approx(2000)
    with pytest.raises(UserError, match="has nothing like"):
        video_stages(tmp_path, model="wan22_5b", facts=replace(larger, tokens=5_070))


def test_several_shapes_are_priced_by_the_mean_of_their_tokens(tmp_path: Path) -> None:
    # Facts count the tokens of the smallest shape; the other one has four times as many.
    figure = video_stages(tmp_path, "model.resolution=[[480, 832], [960, 1664]]").figures["regeneration step (bf16)"]
    assert figure.ms == pytest.approx(300 * (1 + 4) / 2)
