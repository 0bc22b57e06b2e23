"""What several files of unit tests begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.made_configs import MODEL, REST


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Two files that make a whole configuration, every other value a default."""
    model, rest = tmp_path / "model.yaml", tmp_path / "rest.yaml"
    model.write_text(MODEL)
    rest.write_text(REST)
    return [model, rest]
