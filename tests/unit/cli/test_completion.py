"""What a shell offers for the beginning of a command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.command_line import refusal, solrl

OFFER = """source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_solrl
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert solrl("completion", "bash") == 0
    path = tmp_path / "solrl.bash"
    path.write_text(capsys.readouterr().out)
    return path


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("tra", ["train", "trace"]),
        ("prompts im", ["import"]),
        ("train flux1", ["flux1_dev", "flux1_dev_80gb", "flux1_dev_eight_gpus", "flux1_dev_published"]),
        ("train one_gpu flow", ["flow_grpo", "flow_grpo_fast"]),
        ("train demo --set rollout.po", ["rollout.pool"]),
        ("train mine", ["mine.yaml"]),
        ("eval runs --rewards pick", ["pickscore"]),
        ("push --re", ["--revision"]),
        ("push ru", ["runs"]),
    ],
)
def test_commands_options_configurations_keys_and_files_are_offered(
    words: str, offered: list[str], script: Path, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    (there / "runs").mkdir(parents=True)
    (there / "mine.yaml").touch()
    bash = shutil.which("bash")
    assert bash
    command = [bash, "--norc", "-c", OFFER, "bash", str(script), "solrl", *words.split()]
    done = subprocess.run(command, cwd=there, capture_output=True, text=True, check=True)
    assert [word for word in done.stdout.splitlines() if word] == offered


def test_zsh_has_the_same_configurations_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert solrl("completion", "zsh") == 0
    text = capsys.readouterr().out
    assert text.startswith("#compdef solrl\n")
    functions = text.partition("_solrl_names_or_files() {")[2]
    assert " flux1_dev_80gb " in functions
    assert " rollout.pool " in functions
    assert refusal(capsys, "completion", "fish").startswith("Argument shell: invalid choice: 'fish'")
