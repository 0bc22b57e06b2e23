"""deploy/Dockerfile: linted, and what its steps copy is enough for what its steps run. No image is built."""

from __future__ import annotations

import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.processes import output_of

REPOSITORY = Path(__file__).parents[3]
DOCKERFILE = REPOSITORY / "deploy" / "Dockerfile"
TOOLS = Path(sys.executable).parent


def instructions() -> list[tuple[str, str]]:
    """Each instruction of the file with its arguments in one line."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]  # type: ignore[misc]


def context(folder: Path, until: str) -> str:
    """Fill `folder` with what WORKDIR holds when the step `until` runs; returns the name of its stage."""
    stage = ""
    for name, arguments in instructions():
        if name == "RUN" and arguments.split(" && ")[0] == until:
            return stage
        if name == "FROM":
            stage = arguments.split()[-1]
        if name == "COPY":
            *sources, target = arguments.split()
            for source in sources:
                place = folder / target / source if target.endswith("/") else folder / target
                copy = shutil.copytree if (REPOSITORY / source).is_dir() else shutil.copy
                copy(REPOSITORY / source, place)
    raise AssertionError(f"{DOCKERFILE} has no step RUN {until}")


def test_the_dockerfile_is_what_its_linter_wants() -> None:
    linter = TOOLS / "hadolint"
    if not linter.exists():
        pytest.skip(f"there is no {linter}; `make install` brings it")
    output_of(str(linter), str(DOCKERFILE), cwd=REPOSITORY)


def test_what_each_stage_makes_does_not_run_as_root() -> None:
    stage = ""
    last: dict[str, str] = {}
    for name, arguments in instructions():
        stage = arguments.split()[-1] if name == "FROM" else stage
        last[stage] = arguments if name == "USER" else last.get(stage, "root")
    assert last == {"cpu": "1000", "gpu": "1000"}


@pytest.mark.parametrize(("step", "stage"), [("make install", "cpu"), ("make install-gpu", "gpu")])
def test_a_step_that_installs_has_what_its_rules_read(step: str, stage: str, tmp_path: Path) -> None:
    assert context(tmp_path, step) == stage
    assert "uv pip" in output_of(*step.split(), "--dry-run", cwd=tmp_path)


def test_what_is_copied_before_the_first_of_them_is_enough_to_build_the_package(tmp_path: Path) -> None:
    context(tmp_path, "make install")
    code = "from setuptools import build_meta; import sys; print(build_meta.build_wheel(sys.argv[1]))"
    wheel = output_of(sys.executable, "-c", code, str(tmp_path / "dist"), cwd=tmp_path).splitlines()[-1]
    names = zipfile.ZipFile(tmp_path / "dist" / wheel).namelist()
    assert {"actors/controller.py", "solrl_ray/cli/__init__.py", "solrl_ray/configs/demo.yaml"} <= set(names)


def test_what_is_added_for_gpus_has_transformer_engine_and_changes_no_other_version() -> None:
    base, gpu = (
        set(re.findall(r"^([\w.-]+==\S+)", (REPOSITORY / lock).read_text(), flags=re.MULTILINE))
        for lock in ("requirements.lock", "requirements-gpu.lock")
    )
    names = {pin.partition("==")[0] for pin in base}
    assert not {pin for pin in gpu - base if pin.partition("==")[0] in names}
    added = {pin.partition("==")[0] for pin in gpu - base}
    assert added >= {"transformer-engine-torch", "transformer-engine-cu13", "nvidia-cuda-crt", "nvidia-curand", "wheel"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_steps_of_the_first_stage_make_an_environment_that_plans_the_demo(tmp_path: Path) -> None:
    context(tmp_path, "make install")
    output_of("make", "install", f"PYTHON={sys.executable}", cwd=tmp_path)
    planned = output_of(
        str(tmp_path / ".venv/bin/python"), "-m", "solrl_ray", "plan", "configs/demo.yaml", cwd=tmp_path
    )
    assert "12 prompts × 24 seeds" in planned
