"""Bad input that shows only when workers compute: one sentence, a status that is not 0, nothing trained."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray

from actors.client import launch
from solrl_ray.cli import main
from solrl_ray.config.loading import to_yaml
from solrl_ray.config.own_functions import attached
from solrl_ray.errors import UserError
from solrl_ray.storage.run_folder import RunFolder
from tests.support.patience import patience
from tests.support.small import folder, small_config

pytestmark = pytest.mark.usefixtures("local_ray")


def test_a_reward_that_fails_ends_the_command_with_one_sentence_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path, "nan", "rewards=[{kind: 'tests.system.rewards:nan'}]")
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert main(["train", str(file), "--no-live"]) == 1
    (message,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "tests.system.rewards:nan" in message
    assert "Traceback" not in message
    assert not (folder(config) / "checkpoints").exists()
    assert not list((folder(config) / "journal").glob("*"))


def test_a_reward_is_tried_on_a_worker_that_is_not_this_machine(tmp_path: Path) -> None:
    config = attached(small_config(tmp_path, "tried", "rewards=[{kind: 'tests.system.rewards:fails'}]"))
    with pytest.raises(UserError, match=r"^rewards.0.kind is 'tests.system.rewards:fails', which was tried") as refused:
        launch.try_own_rewards(config, elsewhere=True)
    assert 'raise ValueError("as it should")' in str(refused.value)
    assert "solrl_ray" not in str(refused.value)
    fine = attached(small_config(tmp_path, "fine", "rewards=[{kind: 'tests.system.rewards:brightness'}]"))
    launch.try_own_rewards(fine, elsewhere=True)


def test_a_run_that_waits_for_nodes_keeps_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config(tmp_path, "waiting", "fleet.explorers.num_gpus=2", "fleet.deadlines.resources=3")
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    with ThreadPoolExecutor() as aside:
        waits = aside.submit(main, ["train", str(file), "--no-live"])
        while "waiting for nodes" not in capsys.readouterr().out:
            assert not waits.done(), waits.result()
            time.sleep(0.05)
        with pytest.raises(UserError, match="is in use by process"):
            RunFolder(folder(config)).lock.acquire(seconds=0.0)
        assert waits.result(timeout=patience()) == 2
    said = capsys.readouterr().err
    assert "error: the actors ask for 2 GPUs (fleet.explorers 2), but the cluster has 1;" in said
    RunFolder(folder(config)).create(config, resume=False)  # the corrected command may use the same run name


DRIVER = """
import sys, time
from actors.client.connect import join
join(sys.argv[1])
try:
    print("joined", flush=True)
    for _ in range(600):
        time.sleep(0.1)  # a signal that comes right before a sleep is acted on after it
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_sigterm_ends_a_driver_as_ctrl_c_does() -> None:
    address = ray.get_runtime_context().gcs_address
    with subprocess.Popen([sys.executable, "-c", DRIVER, address], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "joined\n"
        driver.terminate()
        assert driver.communicate(timeout=patience())[0] == "interrupted\n"
    assert driver.returncode == 0
