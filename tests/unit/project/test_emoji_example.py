"""The emoji example's page of pictures before and after: the same seeds side by side, under their prompts."""

from __future__ import annotations

import argparse
from pathlib import Path

import before_after
import numpy as np
import pytest
from PIL import Image


def kept(folder: Path, level: int, samples: int) -> dict[tuple[str, int], Path]:
    """Pictures of two prompts, whose grey is `level` and ten for each sample."""
    folder.mkdir()
    found = {(prompt, n): folder / f"{prompt}-{n}.png" for prompt in ("b", "a") for n in range(samples)}
    for (_, n), file in found.items():
        Image.fromarray(np.full((4, 4, 3), level + 10 * n, np.uint8)).save(file)
    return found


def run(folder: Path, after: int) -> argparse.Namespace:
    pictures = {"base": kept(folder / "base", 0, 2), "final": kept(folder / "final", 100, after)}
    shown = {"base": argparse.Namespace(captions={"a": "a bus", "b": "a cat"})}
    return argparse.Namespace(folder=folder, pictures=pictures, shown=shown)


def test_a_row_has_the_base_and_then_the_same_seeds_of_the_policy(tmp_path: Path) -> None:
    rows = before_after.rows(run(tmp_path, 2), prompts=2, samples=2)  # type: ignore[arg-type]
    assert [caption for caption, _ in rows] == ["a bus", "a cat"]
    for _, pictures in rows:
        assert [picture.getpixel((0, 0))[0] for picture in pictures] == [0, 10, 100, 110]
    page = before_after.page(rows)
    assert page.size == (4 * 4, 2 * (4 + before_after.LINE))
    for top in (before_after.LINE, 2 * before_after.LINE + 4):
        assert [page.getpixel((4 * column, top))[0] for column in range(4)] == [0, 10, 100, 110]


@pytest.mark.parametrize(("after", "skip", "kept"), [(1, 0, 0), (2, 1, 2)])
def test_a_run_that_kept_fewer_is_refused(after: int, skip: int, kept: int, tmp_path: Path) -> None:
    needed = rf"evaluation\.pictures of at least {2 + skip}, and evaluation\.samples of at least 2"
    with pytest.raises(SystemExit, match=f"kept {kept} prompts with 2 images .* {needed}"):
        before_after.rows(run(tmp_path, after), prompts=2, samples=2, skip=skip)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "none is not a run folder: there is no such folder"),
        (["--prompts", "0"], "--prompts is 0; it must be at least 1"),
        (["--samples", "0"], "--samples is 0; it must be at least 1"),
        (["--skip", "-1"], "--skip is -1; it must be at least 0"),
    ],
)
def test_a_run_that_is_not_there_and_no_pictures_are_refused(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        before_after.main([str(tmp_path / "none"), str(tmp_path / "page.png"), *options])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
