"""The time that evaluations from outside may take of a run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from actors.evaluation.requests import PATIENCE, EvaluationRequest, EvaluationRequests
from solrl_ray.errors import UserError
from solrl_ray.records import Prompt
from tests.support.iteration_scene import Here
from tests.support.small import small_config


def test_a_debt_is_paid_back_once_at_the_share_of_each_second(tmp_path: Path) -> None:
    world, nobody = Here(tmp_path), Any
    config = small_config(tmp_path, "run", "evaluation.share=0.5")
    requests = EvaluationRequests(config, world, nobody, nobody, nobody, lambda text: None)  # type: ignore[arg-type]
    requests._debt, left = 10.0, []

    async def windows() -> None:
        for seconds in (4.0, 4.0, 0.0, 20.0):
            world.clock += seconds
            await requests.window(asyncio.Event(), free=False)
            left.append(requests._debt)

    asyncio.run(windows())
    assert left == pytest.approx([8.0, 6.0, 6.0, 0.0])


def test_a_request_is_kept_while_it_is_polled_and_forgotten_after(tmp_path: Path) -> None:
    world, nobody, told = Here(tmp_path), Any, list[str]()
    config = small_config(tmp_path, "run")
    requests = EvaluationRequests(config, world, nobody, nobody, nobody, told.append)  # type: ignore[arg-type]
    requests.submit(EvaluationRequest(name="mine", config=config, prompts=(), updates=0, publications={}))

    async def after(seconds: float) -> None:
        world.clock += seconds
        await requests.window(asyncio.Event(), free=False)

    for _ in range(3):
        asyncio.run(after(PATIENCE - 1))
        assert requests.poll("mine") is not None
    asyncio.run(after(PATIENCE + 1))
    assert requests.poll("mine") is None
    assert "mine is dropped" in told[-1]


def test_a_picture_that_is_not_there_ends_the_evaluation_and_not_the_run(tmp_path: Path) -> None:
    world, config, nobody = Here(tmp_path), small_config(tmp_path, "run"), Any

    class Embeddings:
        async def one(self, prompt: Prompt, guidance_of: Any) -> Any:
            raise UserError("no picture")

    requests = EvaluationRequests(config, world, nobody, nobody, Embeddings(), lambda text: None)  # type: ignore[arg-type]
    publications: Any = {"ema": None}
    request = EvaluationRequest(
        name="asked", config=config, prompts=(Prompt(id="p", text="p"),), updates=1, publications=publications
    )
    requests.submit(request)
    asyncio.run(requests.window(asyncio.Event(), free=False))
    progress = requests.poll("asked")
    assert progress is not None
    assert str(progress.error) == "no picture"
    assert not requests.wait
