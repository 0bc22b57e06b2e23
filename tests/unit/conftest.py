"""What several files of unit tests begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.made_configs import MODEL, REST


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Two files that make a whole configuration, every other value a default."""
    model, rest = tmp_path / "model.yaml", tmp_path / "rest.yaml"
    model.write_text(MODEL)
    rest.write_text(REST)
    return [model, rest]


@pytest.fixture
def own_threads() -> Iterator[None]:
    """Puts back the number of threads that a test sets."""
    import torch  # takes seconds

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def group_of_one() -> Iterator[None]:
    """A process group of this process alone."""
    import torch  # takes seconds

    from solrl_ray.learning.engine import free_port, leave_process_group, process_group

    shared_memory = set(Path("/dev/shm").iterdir())
    process_group(0, 1, "127.0.0.1", free_port(), device=torch.device("cpu"), timeout=60, one_host=True)
    yield
    leave_process_group()
    left = {path.name for path in set(Path("/dev/shm").iterdir()) - shared_memory}
    assert not [name for name in left if "allreduce" in name], "DeepSpeed's shared-memory operator was built"


@pytest.fixture
def config_file(tmp_path: Path, tiny_pipeline: Path, tiny_clip: Path) -> Path:
    """A whole small run whose files are all there."""
    from tests.support import tiny  # takes seconds

    (tmp_path / "train.txt").write_text("a red ring\na blue cross\na green disc\n")
    (tmp_path / "heldout.txt").write_text("a red cross\na blue disc\n")
    file = tmp_path / "config.yaml"
    file.write_text(f"""
run: {{name: small, root: {tmp_path / "runs"}, iterations: 3}}
model:
  family: flux
  path: {tiny_pipeline}
  dtype: float32
  resolution: {tiny.RESOLUTION}
  max_sequence_length: {tiny.T5_TOKENS}
  schedule: {{kind: flux}}
  lora: {{rank: 4, targets: [to_q, to_k]}}
prompts: {{train: {tmp_path / "train.txt"}, heldout: {tmp_path / "heldout.txt"}}}
rewards: [{{kind: clipscore, path: {tiny_clip}}}]
rollout: {{prompts: 2, pool: 8, keep: 4, explore: {{micro_batch: 8}}, regenerate: {{micro_batch: 4}}}}
learner: {{micro_batch: 4}}
evaluation: {{prompts: 2, pictures: 1}}
""")
    return file
