"""Several shapes of samples in one run, on a real Ray."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from PIL import Image

from actors.client import launch
from solrl_ray.config.schema import Config
from solrl_ray.prompts.prompt_set import read_prompts, shape_of
from solrl_ray.report.data import read_run
from tests.support.small import digests, folder, small_config

pytestmark = pytest.mark.usefixtures("local_ray")

WIDE, TALL = [24, 40], [40, 24]


def config_of(root: Path, name: str, *overrides: str) -> Config:
    train = root / "train.jsonl"
    texts = ["a large red circle", "a small blue square", "a green triangle above a red ring"]
    named = [{"text": texts[0], "resolution": WIDE}, {"text": texts[1], "resolution": TALL}, {"text": texts[2]}]
    train.write_text("".join(json.dumps(entry) + "\n" for entry in named))
    sizes = (f"model.resolution={[WIDE, TALL]}", f"prompts.train='{train}'", "run.iterations=2")
    return small_config(root, name, *sizes, "evaluation={prompts: 6, pictures: 6, samples: 1}", *overrides)


def test_two_shapes_are_learned_from_with_the_same_bytes_by_one_explorer_and_by_two(tmp_path: Path) -> None:
    one = config_of(tmp_path, "one")
    launch.train(one, live=False)
    two = config_of(tmp_path, "two", "fleet.explorers.count=2", "fleet.regenerators.count=2")
    launch.train(two, live=False)
    assert digests(one) == digests(two)

    iterations = read_run(folder(one)).iterations
    assert all(record.gradient_norm > 0 for record in iterations)
    made = {
        prompt.id: shape_of(prompt, one.model.shapes, one.run.seed) for prompt in read_prompts(one.prompts.heldout)[:6]
    }
    assert set(made.values()) == set(one.model.shapes)
    for (prompt_id, shape), evaluation in product(made.items(), ("updates-000000-base", "updates-000002-ema")):
        with Image.open(folder(one) / "evaluations" / evaluation / f"{prompt_id}-0.png") as picture:
            assert (picture.height, picture.width) == (shape.height, shape.width)
