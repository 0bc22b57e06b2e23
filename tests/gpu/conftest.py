"""Fixtures of the tests that need a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def usual_workers() -> Iterator[None]:
    """A local Ray whose workers are no forks: CUDA does not work in a fork of a process that asked for devices."""
    import ray

    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="warning")
    yield
    ray.shutdown()
