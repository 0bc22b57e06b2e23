"""The Python interface: a run from a real Jupyter kernel has the bytes of one that the command trains."""

from __future__ import annotations

import json
from pathlib import Path

import nbclient
import nbformat
import pytest

import solrl_ray
from solrl_ray.config.schema import Config
from tests.support.patience import patience
from tests.support.small import SIZES, digests, small_config

KERNEL_SECONDS = 300.0


def notebook(folder: Path, *cells: str) -> list[list[str]]:
    """Run cells in a kernel whose present folder is `folder`; the plain lines of each cell's output."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    done = nbclient.NotebookClient(
        book, timeout=int(patience(KERNEL_SECONDS)), resources={"metadata": {"path": str(folder)}}
    ).execute()
    return [
        "".join(output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in cell.outputs)
        .strip()
        .splitlines()
        for cell in done.cells
    ]


def overrides(root: Path, name: str) -> dict[str, object]:
    """What `small_config` sets, as key → value."""
    whole, values = small_config(root, name), {}
    for entry in SIZES:
        key = entry.partition("=")[0]
        values[key] = whole.value_of(key) if "." in key else getattr(whole, key)
    return {
        key: value.model_dump(mode="json") if hasattr(value, "model_dump") else value
        for key, value in values.items()
        if key not in ("fleet",)
    } | {"run.root": str(root), "run.name": name, "fleet.explorers.count": 1, "fleet.regenerators.count": 1}


def test_a_notebook_trains_stops_resumes_and_trains_again(calm: Config, forked_workers: None, tmp_path: Path) -> None:
    """Preset rewards: the digests of the command's run. Then a function of a cell, in the same kernel."""
    settings = json.dumps(overrides(tmp_path, "cells") | {"fleet.learners.threads": 1})
    (tmp_path / "actors").mkdir()  # the user's own package of that name
    (tmp_path / "actors" / "__init__.py").write_text("raise SystemError('imported in place of the installed one')\n")
    lines = notebook(
        tmp_path,
        f"import json, solrl_ray\nsettings = json.loads({settings!r})\nseen = []",
        "def stop_early(run, metrics):\n"
        "    seen.append(metrics.iteration)\n"
        "    run.stop()\n"
        "run = solrl_ray.train('demo', overrides=settings, callbacks=[stop_early])\n",
        "import asyncio; assert asyncio.get_running_loop().is_running()\n"
        "run = solrl_ray.resume(run, callbacks=[lambda run, metrics: seen.append(metrics.iteration)])\n",
        "print(seen, len(run.metrics()), run.lora.is_dir(), run.report().name)",
        "factor = -1.0\n"
        "def darkness(images, prompts):\n    return factor * images.mean(dim=(1, 2, 3))\n"
        "settings |= {'run.name': 'own', 'run.iterations': 1, 'evaluation.every': 0}\n"
        "own = solrl_ray.train('demo', overrides=settings, rewards=[darkness], prompts=['red', 'green', 'blue'])\n"
        "print(own.metrics()[-1]['reward_mean'] < 0)",
        "try:\n    solrl_ray.train('demo', overrides={'rollout.pol': 3})\n"
        "except solrl_ray.UserError as error:\n    print(error)",
    )
    assert lines[3] == ["[0, 1, 2] 3 True report.html"]
    assert digests(small_config(tmp_path, "cells")) == digests(calm)
    assert lines[4][-1] == "True"
    assert "rollout.pol" in lines[5][-1]
    # The function travels as a file of the run: another process continues the run with it.
    further = solrl_ray.resume(tmp_path / "own", overrides={"run.iterations": 2}, live=False)
    assert [row["iteration"] for row in further.metrics()] == [0, 1]


def test_a_plan_says_whether_a_run_fits() -> None:
    fits = solrl_ray.plan("flux1_dev_80gb", gpu="h100-80")
    assert fits.fits is True
    assert fits.verdict == "fits: about 61 min for 200 iterations on 1 × NVIDIA H100 80GB; peak 56.9 of 85.5 GB"
    assert str(fits).startswith(fits.verdict)
    assert fits.peak_gb == pytest.approx(56.9, abs=0.1)
    assert fits.hours == pytest.approx(1.01, abs=0.02)
    small = solrl_ray.plan("flux1_dev_80gb", gpu="rtx4090")
    assert small.fits is False
    assert small.verdict.startswith("does not fit: peak 36.1 GB")
    assert "usable" in small.problem
    assert small._repr_html_().startswith("<pre>")
