"""The Python interface: what it accepts, and what it refuses with a sentence, before a run is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import solrl_ray
from solrl_ray import interface
from solrl_ray.common import own_code

REWARD = "def shade(images, prompts):\n    return images.mean(dim=(1, 2, 3))\n"


def test_the_package_is_imported_without_its_interface() -> None:
    slow = "{'torch', 'ray', 'pydantic'} & sys.modules.keys()"
    code = f"import sys, solrl_ray; assert not {slow}; print(solrl_ray.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == solrl_ray.__version__
    with pytest.raises(AttributeError, match="no attribute 'tain'"):
        solrl_ray.tain  # noqa: B018


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "No preset was named"),
        ({"presets": ["dmo"]}, "no configuration dmo"),
        ({"presets": ["demo"], "overrides": {"rollout.keep": object()}}, "overrides has a value that is no text"),
        ({"presets": ["demo"], "overrides": {"rollout.keep": "eight"}}, "rollout.keep"),
        ({"presets": ["demo"], "rewards": [3]}, r"rewards\[0\] is a int; it must be a function"),
        ({"presets": ["demo"], "rewards": ["testbed_clip", len]}, "mixes names of presets with functions"),
        ({"presets": ["demo"], "prompts": ["a", 3]}, "prompts.train has an entry of type int"),
        ({"presets": ["demo"], "gpu": "h900"}, "h900"),
    ],
)
def test_bad_input_is_one_sentence(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(solrl_ray.UserError, match=words) as caught:
        solrl_ray.plan(*arguments.pop("presets", ()), **arguments)
    assert "\n" not in str(caught.value)


def test_a_function_that_has_no_file_travels_with_what_it_refers_to(tmp_path: Path) -> None:
    factor = torch.tensor(3.0)
    spec, code = own_code.by_value(lambda images, prompts: factor * images.sum(), "rewards[0]")
    own_code.write(code, tmp_path)
    read = own_code.read(spec, tmp_path)  # as a resumed run does
    assert read is not None
    assert {name: text for name, text in read.texts.items()} == code.texts
    function = getattr(own_code.load(read), spec.rpartition(":")[2])
    assert function(torch.ones(2), []).item() == 6.0
    assert own_code.is_by_value(spec)


def test_a_function_of_a_file_is_named_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_shades.py").write_text(REWARD)
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_shades  # type: ignore[import-not-found]

    spec, code = own_code.by_value(my_shades.shade, "rewards[0]")
    assert spec == f"{tmp_path}/my_shades.py:shade"
    assert list(code.texts.values()) == [REWARD]


def test_what_cannot_be_sent_is_named(tmp_path: Path) -> None:
    with (
        (tmp_path / "log").open("w") as log,
        pytest.raises(solrl_ray.UserError, match=r"rewards\[1\] is .*cannot be sent"),
    ):
        own_code.by_value(lambda images, prompts: log.write("scored"), "rewards[1]")


def test_prompts_are_stored_below_the_runs_own_root(tmp_path: Path) -> None:
    """Also if a YAML file names it: a run is resumed with them, wherever it was started."""
    (tmp_path / "mine.yaml").write_text(f"run: {{root: '{tmp_path / 'shared'}'}}\n")
    loaded = interface._load(["demo", str(tmp_path / "mine.yaml")], None, None, ["a", "b"], None)
    assert Path(loaded.config.prompts.train).parent == tmp_path / "shared" / "prompts"


def test_overrides_reach_into_rewards_and_none_is_refused() -> None:
    def shade(images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        return images.mean(dim=(1, 2, 3))

    loaded = interface._load(["demo"], {"rewards.0.weight": 2.0}, [shade], None, None)
    assert [reward.weight for reward in loaded.config.rewards] == [2.0]
    with pytest.raises(solrl_ray.UserError, match="rewards is empty"):
        interface._load(["demo"], None, [], None, None)


def test_prompts_may_be_a_list_or_a_table(tmp_path: Path) -> None:
    class Table(dict[str, list[str]]):  # as a dataset of the `datasets` library: names of columns, columns by name
        column_names = ("id", "caption")

    texts = ["a cat", "two\nlines"]
    listed = interface._prompts(texts, "prompts.train", tmp_path)
    assert interface._prompts(Table(id=["0", "1"], caption=texts), "prompts.train", tmp_path) == listed
    assert Path(listed).read_text() == '{"text": "a cat"}\n{"text": "two\\nlines"}\n'
    Table.column_names = ("id",)
    with pytest.raises(solrl_ray.UserError, match="a table with columns id; one must be named prompt"):
        interface._prompts(Table(id=["0"]), "prompts.train", tmp_path)
