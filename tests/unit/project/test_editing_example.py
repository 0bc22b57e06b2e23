"""The example of a model that edits: its reward, its prompts, and a run that learns the edits."""

from __future__ import annotations

from pathlib import Path

import edits
import one_process
import pytest
import torch
from safetensors.torch import load_file

from solrl_ray.config.loading import load
from solrl_ray.prompts.prompt_set import read_prompts
from solrl_ray.prompts.references import pictures
from solrl_ray.records import Address
from solrl_ray.report import card
from solrl_ray.report.data import read_run
from solrl_ray.report.grids import REFERENCE
from solrl_ray.report.pictures import Gallery
from solrl_ray.testbed.world import COLOURS, Scene, parse, picture
from tests.support.small import CONFIGS, folder

ADDRESS = Address(run_seed=3, purpose="t")
BEFORE, AFTER = "a large blue ring on grey", "a large red ring on grey"


def drawn(*texts: str) -> torch.Tensor:
    return torch.stack([picture(text, ADDRESS) for text in texts])


def test_the_reward_is_1_for_the_drawn_edit_and_less_for_all_else() -> None:
    reference = drawn(BEFORE)
    others = [BEFORE, "a large green ring on grey", "a large red circle on grey", "a small red ring on grey"]
    moved = picture(AFTER, Address(run_seed=4, purpose="t"))[None]
    edited = edits.recoloured(drawn(AFTER), [AFTER], reference)
    assert edited.item() == pytest.approx(1, abs=1e-3)
    for wrong in [*drawn(*others)[:, None], moved]:
        assert edits.recoloured(wrong, [AFTER], reference) < edited - 0.05


def test_a_colour_between_two_counts_by_its_distances_from_both() -> None:
    reference = drawn("a large orange square on grey")
    wanted = drawn("a large yellow square on grey")
    between = torch.lerp(wanted, reference, 0.25)  # orange is the nearest of the other colours
    score = edits.recoloured(between, ["a large yellow square on grey"], reference)
    assert score.item() == pytest.approx(0.75**4 / (0.25**4 + 0.75**4), abs=0.03)  # its edges cost a little


def test_what_changes_beside_the_object_costs_the_more_the_smaller_it_is() -> None:
    for size, pixels in (("large", 11.1), ("small", 6.1)):  # the square's sides
        reference, spotted = drawn(f"a {size} blue square on grey"), drawn(f"a {size} red square on grey")
        spotted[..., :2, :8] += 0.5  # 16 pixels
        score = edits.recoloured(spotted, [f"a {size} red square on grey"], reference)
        assert score.item() == pytest.approx(1 - 0.5 * (16 / pixels**2) ** 0.5, abs=0.02)


def test_parts_share_no_edit_and_each_prompt_changes_only_a_colour(tmp_path: Path) -> None:
    edits.write_prompts(tmp_path, {"train": 40, "heldout": 10})
    train, heldout = (read_prompts(str(tmp_path / f"{part}.jsonl")) for part in ("train", "heldout"))
    assert (len(train), len(heldout)) == (40, 10)
    assert not {prompt.id for prompt in train} & {prompt.id for prompt in heldout}
    for prompt in heldout:
        seen = torch.from_numpy(pictures(prompt, 32, 32)).float() / 255
        fields = list(parse(prompt.text).fields)
        scores = []
        for colour in range(len(COLOURS)):
            text = Scene(tuple([*fields[:2], colour, *fields[3:]])).caption
            scores.append(edits.recoloured(seen, [text], seen).item())
        assert max(scores) == pytest.approx(1, abs=0.02)  # 8 bits
        assert scores.index(max(scores)) != fields[2]


def test_the_testbeds_edits_are_trained_and_shown_with_their_references(tmp_path: Path) -> None:
    made = edits.write_all(tmp_path / "edits", {"train": 4, "heldout": 2}, steps=2)
    sizes = (
        "rollout={prompts: 2, pool: 4, keep: 2}",
        "rollout.explore={steps: 3, micro_batch: 4}",
        "rollout.regenerate={steps: 4, micro_batch: 2}",
        "learner.updates=2",
        "evaluation={every: 0, prompts: 2, samples: 1, steps: 2, pictures: 1}",
        f"run={{iterations: 2, root: '{tmp_path}'}}",
    )
    config = load([CONFIGS / "demo.yaml", made], sizes)
    one_process.train(one_process.checked(config))
    run = read_run(folder(config))
    assert all(record.gradient_norm > 0 and record.differing_results == 0 for record in run.iterations)
    by_policy = {record.policy: record.reward_mean for record in run.evaluations}
    assert by_policy.keys() == {"real", "base", "ema"}
    assert by_policy["real"] == pytest.approx(1, abs=0.01)  # it draws what is asked for
    assert all(0 <= by_policy[policy] < 0.5 for policy in ("base", "ema"))
    first = read_prompts(config.prompts.heldout)[0]
    assert run.pictures[REFERENCE].keys() == {(first.id, 0)}
    (shown,) = Gallery.of_run(run).cards
    assert list(shown.rows) == [REFERENCE, "base", "final", "real"]
    published = card.contents(run, card.Target(repository="me/edits", revision=None))
    assert "<th>reference</th><th>base</th><th>trained</th>" in published["README.md"].decode()
    assert published[f"images/references-{first.id}-0.png"].startswith(b"\x89PNG")


def test_copies_and_faded_objects_get_nothing(tmp_path: Path) -> None:
    edits.write_prompts(tmp_path, {"heldout": 12})
    copied, faded, edited = edits.without_edits(tmp_path).values()
    assert copied < 1e-3
    assert faded < 0.01
    assert edited == pytest.approx(1, abs=1e-3)


def test_teaching_changes_the_pipelines_weights_and_nothing_else_of_them(tmp_path: Path) -> None:
    tensors = []
    for steps in (0, 1):
        edits.write_all(tmp_path / str(steps), {"train": 1, "heldout": 1}, steps=steps)
        tensors.append(load_file(tmp_path / f"{steps}/pipeline/transformer/diffusion_pytorch_model.safetensors"))
    before, after = tensors
    assert {name: (each.shape, each.dtype) for name, each in before.items()} == {
        name: (each.shape, each.dtype) for name, each in after.items()
    }
    moved = torch.cat([(after[name].float() - before[name].float()).abs().flatten() for name in before])
    assert 0 < moved.mean() < 2e-3  # AdamW's first step moves no weight by more than its rate, 1e-3, and rounding
