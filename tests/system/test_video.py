"""Videos on a real Ray: two stages, previews of some of their frames, and clips in the report, in two methods."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image, ImageSequence

from actors.client import launch
from solrl_ray.config.checks import check
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.report.data import read_run
from tests.support import tiny_wan
from tests.support.families import model_config
from tests.support.small import CONFIGS, SIZES, digests, folder

pytestmark = pytest.mark.usefixtures("local_ray")

VIDEO = (
    "run.iterations=2",
    "rollout.preview={latent_frames: [0, 2], prune: {after: 2, keep: 4}, unit: 8}",
    "rewards=[{kind: motion, enough: 1}, "
    "{kind: 'tests.system.rewards:brightness', frames: {count: 3, combine: worst}}, "
    "{kind: 'tests.system.rewards:frames', weight: 10}]",
    "evaluation={prompts: 2, samples: 2, steps: 3, pictures: 1, reference: ''}",
)
METHODS = {
    "diffusion_nft": (),
    "flow_grpo_fast": (
        "rollout.sampler.window={size: 1, range: [0, 2]}",
        "rollout.explore.steps=4",
        "rollout.prompts=2",
    ),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_wan.build_wan(tmp_path_factory.mktemp("wan") / "pipeline")


def config(root: Path, name: str, checkpoint: Path, method: str, *more: str) -> Config:
    files = [CONFIGS / "demo.yaml", CONFIGS / f"methods/{method}.yaml"]
    sizes = [each for each in SIZES if method == "diffusion_nft" or not each.startswith("objective.")]
    given = [*sizes, *VIDEO, *METHODS[method], f"run.root='{root}'", f"run.name={name}", *more]
    made = load(files, given)
    model = model_config("wan", checkpoint)
    made = made.model_copy(update={"model": model})
    check(made)
    return made


@pytest.mark.parametrize("method", METHODS)
def test_a_run_of_videos_learns_and_reports_clips_whoever_explores(
    method: str, checkpoint: Path, tmp_path: Path
) -> None:
    one = config(tmp_path, "one", checkpoint, method)
    launch.train(one, live=False)
    done = read_run(folder(one)).iterations
    assert [record.iteration for record in done] == [0, 1]
    assert all(record.gradient_norm > 0 and record.passes == record.expected_passes > 0 for record in done)
    # Motion and brightness are within [0, 1]; two latent frames are five frames.
    assert all(50 <= record.proxy_reward_mean <= 52 and 90 <= record.reward_mean <= 92 for record in done)
    shown = folder(one) / "evaluations" / "updates-000002-ema"
    (strips, clips) = (sorted(shown.glob(f"*.{kind}")) for kind in ("png", "webp"))
    assert [path.stem for path in strips] == [path.stem for path in clips]
    assert len(clips) == 2
    with Image.open(clips[0]) as clip, Image.open(strips[0]) as strip:
        assert (len(list(ImageSequence.Iterator(clip))), clip.size) == (tiny_wan.FRAMES, (16, 16))
        assert strip.size == (5 * 16, 16)
    page = (folder(one) / "report.html").read_text()
    # Before and after: two policies' two samples.
    assert len(re.findall(r'src="data:image/webp;base64,', page)) == 4
    if method == "diffusion_nft":
        two = config(tmp_path, "two", checkpoint, method, "fleet.explorers.count=2")
        launch.train(two, live=False)
        assert digests(two) == digests(one)
