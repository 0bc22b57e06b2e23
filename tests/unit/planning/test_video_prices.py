"""What a plan says of videos' time, against sums done by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from solrl_ray.config.loading import load
from solrl_ray.planning.arithmetic import ModelFacts, describe
from solrl_ray.planning.prices import Cluster, Priced, Unpriced, price_list, priced

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
    assert decoded.source == "here; a preview decodes 13 of 49 frames and counts with that share of it"


def test_a_longer_video_has_no_prices(tmp_path: Path) -> None:
    with pytest.raises(Unpriced, match=r"no wan at 480 x 832 px, 81 frames .*; it has wan at 480 x 832 px, 49 frames"):
        video_stages(tmp_path, "model.frames=81")
