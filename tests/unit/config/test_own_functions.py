"""The files of a user's functions go with the configuration, and a run goes on with those that it began with."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from solrl_ray import rewards
from solrl_ray.config import own_functions
from solrl_ray.config.loading import Sources, load, to_yaml
from solrl_ray.config.schema import Config
from solrl_ray.errors import UserError
from solrl_ray.storage.run_folder import RunFolder
from tests.support.command_line import refusal, solrl

BRIGHT = "def f(images, prompts):\n    return images.mean(dim=(1, 2, 3))\n"
DARK = BRIGHT.replace("return ", "return -")
OWN = "rewards=[{kind: 'mine/liked.py:f'}]"


@pytest.fixture
def own(config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "liked.py").write_text(BRIGHT)
    return config_file


def begun(file: Path, *overrides: str) -> RunFolder:
    config = own_functions.attached(load([file], [OWN, *overrides]))
    folder = RunFolder.of(config)
    folder.create(config, resume=False)
    folder.lock.release()
    return folder


def score(config: Config) -> float:
    import torch

    images = torch.full((1, 3, 8, 8), 0.25)
    return rewards.load(config.rewards, "cpu").score(images, ["a ring"]).item()


def test_the_files_reach_a_worker_that_has_another_folder_and_no_such_file(own: Path, tmp_path: Path) -> None:
    config = own_functions.attached(load([own], [OWN]))
    travelling = pickle.dumps(config)
    (tmp_path / "mine" / "liked.py").unlink()
    assert score(pickle.loads(travelling)) == 0.25
    assert "def f" not in to_yaml(config)


def test_a_run_folder_has_the_files_and_a_resumed_run_takes_them_from_there(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = begun(own)
    (tmp_path / "mine" / "liked.py").write_text(DARK)
    stored = load([folder.path / "config.yaml"])
    assert score(own_functions.attached(stored, resumed=folder.path)) == 0.25
    for arguments in (["--resume", folder.path], [own, "--set", OWN, "--resume"]):
        assert solrl("train", "--dry-run", *arguments) == 0
        said = capsys.readouterr().err
        assert "mine/liked.py:f has changed since the run began (liked.py); the run continues with its copy." in said


@pytest.mark.parametrize("name", ["helper.py", "liked.py", "digests.json"])
def test_a_run_is_not_resumed_with_files_that_were_altered_in_its_folder(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "mine" / "liked.py").write_text("import helper\n" + DARK)
    (tmp_path / "mine" / "helper.py").touch()
    folder = begun(own)
    (stored,) = (folder.path / "code").glob(f"*/{name}")
    stored.write_text("x = 1\n")
    assert f"{stored.parent} are not those that the run stored" in refusal(
        capsys, "train", "--dry-run", "--resume", folder.path
    )


def test_a_helper_that_changed_is_named_and_an_unchanged_function_is_not(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine" / "liked.py").write_text("import helper\n" + BRIGHT)
    (tmp_path / "mine" / "helper.py").touch()
    folder = begun(own)
    assert solrl("train", "--dry-run", "--resume", folder.path) == 0
    assert "has changed" not in capsys.readouterr().err
    (tmp_path / "mine" / "helper.py").unlink()
    assert solrl("train", "--dry-run", "--resume", folder.path) == 0
    assert "has changed since the run began (helper.py); the run continues with its copy." in capsys.readouterr().err


def test_a_resumed_run_without_its_copy_takes_the_present_files(own: Path, tmp_path: Path) -> None:
    folder = begun(own)
    (tmp_path / "mine" / "liked.py").write_text(DARK)
    (folder.path / "code").rename(tmp_path / "gone")
    assert score(own_functions.attached(load([folder.path / "config.yaml"]), resumed=folder.path)) == -0.25


def test_a_fork_takes_the_present_files(own: Path, tmp_path: Path) -> None:
    folder = begun(own)
    (tmp_path / "mine" / "liked.py").write_text(DARK)
    assert score(own_functions.attached(load([folder.path / "config.yaml"]))) == -0.25


def test_an_evaluation_executes_no_file_of_the_run_folder(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = begun(own)
    (tmp_path / "mine" / "liked.py").write_text(DARK)
    config = own_functions.attached(load([folder.path / "config.yaml"]))
    own_functions.check_owner(config, folder.path, Sources())
    (note,) = own_functions.changes(config, folder.path, "the evaluation uses the present files")
    assert "(liked.py); the evaluation uses the present files. The run's copy is " in note
    (copy,) = (folder.path / "code").glob("*/liked.py")
    assert f"{copy.parent}." in note
    config = own_functions.attached(load([own], [f"rewards=[{{kind: '{copy}:f'}}]"]))
    with pytest.raises(UserError, match=r"^rewards.0.kind .* a file in the run folder; files there are not executed"):
        own_functions.check_owner(config, folder.path, Sources())


def test_the_digests_of_earlier_versions_are_refused_with_what_to_use_now(own: Path) -> None:
    both = "rewards=[{kind: 'mine/liked.py:f'}, {kind: 'mine/liked.py:f', code: ''}]"
    for given in (both, "evaluation.reference_code=''"):
        with pytest.raises(UserError, match=r"was removed: leave it out; a resumed run continues with the copy"):
            load([own], [OWN, given])


def test_a_plan_runs_nothing_of_the_users_and_a_dry_run_does(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine" / "liked.py").write_text(f"{BRIGHT}\nraise SystemError('this was run')\n")
    assert solrl("plan", own, "--set", OWN) == 0
    assert solrl("train", own, "--set", OWN, "--dry-run") == 2
    said = capsys.readouterr().err
    assert "the file mine/liked.py cannot be imported: SystemError: this was run" in said
    assert "    raise SystemError('this was run')" in said


def test_modules_of_one_name_and_different_texts_are_refused_unless_they_are_the_functions_own(
    own: Path, tmp_path: Path
) -> None:
    both = "rewards=[{kind: 'mine/liked.py:f'}, {kind: 'other/liked.py:f'}]"
    for folder, number in (("mine", 1), ("other", 2)):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "liked.py").write_text(f"def f(images, prompts):\n    return [{number}.0]\n")
    assert score(own_functions.attached(load([own], [both]))) == 3
    for folder in ("mine", "other"):
        (tmp_path / folder / "liked.py").write_text("import factor\ndef f(images, prompts):\n    return [factor.F]\n")
        (tmp_path / folder / "factor.py").write_text("F = 1.0\n")
    assert score(own_functions.attached(load([own], [both]))) == 2
    (tmp_path / "other" / "factor.py").write_text("F = 2.0\n")
    said = (
        r"^rewards.0.kind \(default\) and rewards.1.kind \(default\) both import a module factor, but .*mine/factor.py"
    )
    with pytest.raises(UserError, match=said):
        own_functions.attached(load([own], [both]))


def test_a_resumed_run_finds_the_data_that_lies_beside_files_that_did_not_change(own: Path, tmp_path: Path) -> None:
    text = "from pathlib import Path\nW = float((Path(__file__).parent / 'w.txt').read_text())\n"
    (tmp_path / "mine" / "liked.py").write_text(f"{text}\ndef f(images, prompts):\n    return [W]\n")
    (tmp_path / "mine" / "w.txt").write_text("0.75")
    folder = begun(own)
    stored = load([folder.path / "config.yaml"])
    assert score(own_functions.attached(stored, resumed=folder.path)) == 0.75
