"""Fixtures shared by all tests: tiny checkpoints of the real classes, built once a session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

os.environ["RAY_AUTH_MODE"] = "disabled"  # loopback only; read when ray is first imported
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # learners in the tests' own process are on the CPU, GPU or not

from solrl_ray.config.schema import Config
from tests import forkserver, tiny
from tests.small import small_config


@pytest.fixture(scope="session")
def tiny_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a FLUX-class pipeline with AutoencoderKL."""
    return tiny.build_pipeline(tmp_path_factory.mktemp("tiny") / "pipeline")


@pytest.fixture(scope="session")
def tiny_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a CLIPModel with tokenizer and image processor."""
    return tiny.build_clip(tmp_path_factory.mktemp("tiny") / "clip")


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """One local Ray for all tests of the system: it takes seconds to start, and runs do not share actors.

    Its workers are forks of one process. Commands that tests start in processes of their own start workers as users do.
    """
    import ray

    with TemporaryDirectory(prefix="ray-", dir="/tmp") as place, forkserver.serving(Path(place)) as command:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="warning",
            object_store_memory=200_000_000,
            runtime_env={"py_executable": command},
            _system_config={"prestart_worker_first_driver": False},  # it would start some that are not forks
        )
        yield
        ray.shutdown()


@pytest.fixture(scope="session")
def calm(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A finished, undisturbed run with one explorer: what every disturbed one must equal."""
    from actors import commands

    config = small_config(tmp_path_factory.mktemp("calm"), "calm")
    commands.train(config, live=False)
    return config
