"""The examples are what they say."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch

from solrl_ray import rewards
from solrl_ray.cli import preflight
from solrl_ray.config import own_functions
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Config
from solrl_ray.errors import RewardError
from solrl_ray.records import Address
from solrl_ray.rewards import endpoint
from solrl_ray.testbed.world import picture
from tests.support.chat_server import serving
from tests.support.command_line import printed
from tests.support.examples import EXAMPLES, JUDGE, PAIRWISE, REWARD_SERVER, listening
from tests.support.processes import output_of
from tests.support.small import CONFIGS

SHIPPED = [path for path in sorted(CONFIGS.glob("rewards/*.yaml")) if re.search(r"kind: *\S+:\S", path.read_text())]
BIN = Path(sys.executable).parent
RED, BLUE = "a large red square on white", "a large blue circle on black"


def documented(file: Path, command: str) -> list[str]:
    """The arguments of a command that the text of an example shows."""
    (line,) = [line for line in file.read_text().splitlines() if f"{command} " in line]
    return shlex.split(line.strip("# ").removeprefix(command))


def shown(*prompts: str) -> torch.Tensor:
    """What the prompts of the testbed's world say, [B, 3, 32, 32]."""
    return torch.stack([picture(prompt, Address(run_seed=1, purpose="test", prompt_id=prompt)) for prompt in prompts])


def test_the_reward_of_the_example_stands_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    source = EXAMPLES / "own_reward" / "my_rewards.py"
    override = documented(source, "solrl train")[2]
    config = own_functions.attached(load([CONFIGS / "demo.yaml"], [override]))
    assert Path(config.rewards[0].kind.rpartition(":")[0]) == source.relative_to(EXAMPLES.parent)
    preflight.functions(preflight.Run(config))


def test_a_trial_says_that_a_reward_is_the_same_for_every_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my_rewards.py"
    file.write_text("def flat(images, prompts):\n    return [1.0] * len(prompts)\n")
    config = own_functions.attached(load([CONFIGS / "demo.yaml"], [f"rewards=[{{kind: '{file}:flat'}}]"]))
    preflight.functions(preflight.Run(config))
    assert "1 and 1 for two images of noise, which are equal: a run learns" in capsys.readouterr().out


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_function_that_a_ready_part_names_stands_its_trial_on_the_prompts_of_the_demo(path: Path) -> None:
    config = own_functions.attached(load([CONFIGS / "demo.yaml", path]))
    assert any(":" in reward.kind for reward in config.rewards)
    preflight.functions(preflight.Run(config))


def test_the_prompts_of_the_example_are_imported_and_planned_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    file = EXAMPLES / "own_prompts" / "prompts.yaml"
    assert "24" in printed(capsys, "prompts", "import", *documented(file, "solrl prompts import"))
    said = printed(capsys, "plan", *documented(file, "solrl train"))
    assert re.search(r"prompts +24 to train on, 8 held out", said)
    assert "run         own-prompts" in said


def of_example(file: Path, port: int, *overrides: str) -> Config:
    section = "judge" if "judge" in file.name else "remote"
    url = {"judge": f"http://127.0.0.1:{port}/v1", "remote": f"http://127.0.0.1:{port}/score"}[section]
    return load([CONFIGS / "demo.yaml", file], [f"rewards.0.{section}.url={url}", *overrides])


def scores(config: Config, *prompts: str, of: torch.Tensor) -> list[float]:
    rewards.check(config.rewards, config.model.shapes, str)
    found: list[float] = rewards.load(config.rewards, "cpu").score(of, prompts).tolist()
    return found


def test_the_reward_server_says_how_red_pictures_are() -> None:
    images = torch.zeros(2, 3, 8, 8)
    images[0, 0] = 1  # red; the other one is black
    with listening(REWARD_SERVER) as port:
        assert scores(of_example(REWARD_SERVER.with_name("reward.yaml"), port), RED, RED, of=images) == [1.0, 0.0]


def test_the_reward_server_wants_its_token_and_says_what_is_wrong_with_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, images = REWARD_SERVER.with_name("reward.yaml"), torch.zeros(1, 3, 8, 8)
    with listening(REWARD_SERVER, REWARD_TOKEN="s3cret") as port:
        with pytest.raises(RewardError, match=r"401 .*no such token"):
            scores(of_example(file, port), RED, of=images)
        monkeypatch.setenv("REWARD_TOKEN", "s3cret")
        assert scores(of_example(file, port, "rewards.0.remote.token_variable=REWARD_TOKEN"), RED, of=images) == [0.0]
        bad = urllib.request.Request(
            f"http://127.0.0.1:{port}/score", b'{"images": []}', {"Authorization": "Bearer s3cret"}
        )
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(bad, timeout=10)


def test_the_stand_in_of_the_judge_prefers_pictures_that_show_their_prompts_colours() -> None:
    with listening(JUDGE) as port:
        config = of_example(JUDGE.with_name("judge.yaml"), port)
        right = scores(config, RED, BLUE, of=shown(RED, BLUE))
        wrong = scores(config, RED, BLUE, of=shown(BLUE, RED))
    assert min(right) > 0.8
    assert max(wrong) < min(right) - 0.1


def compared(monkeypatch: pytest.MonkeyPatch, url: str, of: torch.Tensor) -> list[float]:
    """The scores of the example that compares, for pictures of one prompt."""
    monkeypatch.chdir(EXAMPLES.parent)
    monkeypatch.setenv("JUDGE_URL", url)
    override = documented(PAIRWISE, "solrl train")[2]
    (reward,) = load([CONFIGS / "demo.yaml"], [override]).rewards
    assert reward.reproducible is False
    found: list[float] = rewards.load([reward], "cpu").score(of, [RED] * len(of)).tolist()
    return found


def test_a_picture_that_shows_its_prompt_wins_its_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(JUDGE) as port:
        pictures = shown(BLUE, RED, BLUE.replace("circle", "square"))
        scores = compared(monkeypatch, f"http://127.0.0.1:{port}/v1", pictures)
    assert scores[1] == 1.0
    assert max(scores[0], scores[2]) <= 0.5


def test_a_judge_that_prefers_a_place_prefers_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = torch.rand(7, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    repeated = torch.cat([pictures, pictures[-1:]])  # as the last batch of a prompt is filled up
    with serving(lambda asked: "Image 2 is better than Image 1? No: Image 1 is better.") as server:
        assert compared(monkeypatch, server.url, repeated) == [0.5] * 8
        assert len(server.asked) == 7 * 4


def test_a_draw_is_half_a_win_and_no_answer_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "PAUSE", 0.001)
    pictures = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    with serving(lambda asked: "Both images are equally good.") as server:
        assert compared(monkeypatch, server.url, pictures) == [0.5, 0.5]
        assert compared(monkeypatch, server.url, pictures[:1]) == [0.5]
        assert len(server.asked) == 2
    with serving(lambda asked: "Hm.") as server, pytest.raises(RewardError, match=r"Hm.* has none of the expected"):
        compared(monkeypatch, server.url, pictures)


def test_what_a_user_sets_comes_after_what_the_script_sets(tmp_path: Path) -> None:
    command = tmp_path / "ray"
    command.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")  # prints what it was called with
    command.chmod(0o755)
    variables = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "RUNS": "/shared/runs"}
    script = [EXAMPLES / "submit" / "submit.sh", "http://127.0.0.1:9", "demo", "--set", "run.root=/mine"]
    said = output_of(*script, **variables)
    job = ["job", "submit", "--address", "http://127.0.0.1:9", "--working-dir", ".", "--"]
    train = ["solrl", "train", "--set", "run.root=/shared/runs", "demo", "--set", "run.root=/mine", "--continue"]
    assert said.splitlines() == [*job, *train]


def test_submitting_names_the_cluster_that_does_not_answer() -> None:
    variables = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "RUNS": "/shared/runs"}
    script = EXAMPLES / "submit" / "submit.sh"

    def refused(*arguments: str) -> str:
        done = subprocess.run([script, *arguments], env=os.environ | variables, capture_output=True, text=True)
        assert done.returncode
        return done.stderr

    assert "usage: submit.sh ADDRESS CONFIG" in refused()
    assert "Failed to connect to Ray at address: http://127.0.0.1:9" in refused("http://127.0.0.1:9", "demo")
