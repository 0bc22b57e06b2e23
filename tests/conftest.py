"""Fixtures shared by all tests: tiny checkpoints of the real classes, built once a session.

Every process of pytest imports this, also those that run no test, and so nothing that takes seconds: that is imported
where it is used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["RAY_AUTH_MODE"] = "disabled"  # loopback only; read when ray is first imported
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # learners in the tests' own process are on the CPU, GPU or not

from solrl_ray.config.schema import Config
from tests.support import forkserver
from tests.support.small import folder, small_config


@pytest.fixture(scope="session")
def tiny_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a FLUX-class pipeline with AutoencoderKL."""
    from tests.support import tiny

    return tiny.build_pipeline(tmp_path_factory.mktemp("tiny") / "pipeline")


@pytest.fixture(scope="session")
def tiny_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a CLIPModel with tokenizer and image processor."""
    from tests.support import tiny

    return tiny.build_clip(tmp_path_factory.mktemp("tiny") / "clip")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all processes that this call of pytest has."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def forks(shared: Path) -> Iterator[str]:
    """The command by which Ray's workers are forks of one process: one for all processes of pytest."""
    with forkserver.shared(shared) as command:
        yield command


@pytest.fixture(scope="session")
def local_ray(forks: str) -> Iterator[None]:
    """One local Ray for all tests of the system: it takes seconds to start, and runs do not share actors.

    It counts a GPU, whether or not there is one: who shares it can be told apart from who does not.
    """
    import ray

    from actors.client import connect

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver.SETUP_WORKER, forkserver.set_up_by(forks))
        connect.init(
            address="local",
            num_cpus=2,
            num_gpus=1,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="warning",
            object_store_memory=200_000_000,
            _system_config={"prestart_worker_first_driver": False},
        )
    yield
    ray.shutdown()


@pytest.fixture
def forked_workers(forks: str) -> Iterator[None]:
    """Nodes and drivers that this test starts have forks as well; else they start as users' do."""
    with forkserver.forked(forks):
        yield


@pytest.fixture(scope="session")
def calm(local_ray: None, shared: Path) -> Config:
    """A finished, undisturbed run with one explorer: what every disturbed one must equal.

    Whichever process of pytest needs it first makes it, on its Ray, and the others wait for it.
    """
    from actors.client import launch

    config = small_config(shared, "calm")
    with forkserver.alone(shared / "calm.lock"):
        if not (folder(config) / "summary.json").exists():
            launch.train(config, live=False)
    return config
