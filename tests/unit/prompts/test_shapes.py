"""Which of several shapes a prompt's samples have."""

from __future__ import annotations

from collections import Counter

import pytest

from solrl_ray.prompts.prompt_set import prompt_id, shape_of
from solrl_ray.records import Prompt, SampleShape

SHAPES = (SampleShape(512, 512), SampleShape(512, 768), SampleShape(768, 512))


def prompt(text: str, shape: SampleShape | None = None) -> Prompt:
    return Prompt(id=prompt_id(text), text=text, shape=shape)


def test_each_shape_is_drawn_about_as_often_and_always_the_same_for_a_prompt() -> None:
    prompts = [prompt(f"prompt {number}") for number in range(900)]
    drawn = [shape_of(each, SHAPES, 42) for each in prompts]
    assert drawn == [shape_of(each, SHAPES, 42) for each in prompts]
    assert drawn != [shape_of(each, SHAPES, 43) for each in prompts]
    # 300 expected, binomial standard deviation 14.1: five of them.
    assert all(abs(count - 300) < 71 for count in Counter(drawn).values())


def test_what_was_drawn_stays_as_it_was() -> None:
    """Of uniform numbers 0.083, 0.760, 0.159 and 0.433. Other draws would make a resumed run another run."""
    texts = ("a cat", "a dog", "a house", "a red square")
    assert [SHAPES.index(shape_of(prompt(text), SHAPES, 42)) for text in texts] == [0, 2, 0, 1]


def test_a_prompts_own_shape_is_taken_and_must_be_one_of_the_runs() -> None:
    assert all(shape_of(prompt("a cat", shape), SHAPES, 42) == shape for shape in SHAPES)
    with pytest.raises(ValueError, match="256 x 512 px"):
        shape_of(prompt("a cat", SampleShape(256, 512)), SHAPES, 42)
