"""A user's own functions: how their files are found, travel, and are imported elsewhere."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

from solrl_ray.common import own_code
from solrl_ray.errors import UserError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(spec: str) -> list[str]:
    code = own_code.find(spec, "kind")
    assert code is not None
    return [file.name for file in code.files]


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        path = folder / f"{name.replace('__in__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_module_of_the_present_folder_travels_with_what_it_imports_from_there(here: Path) -> None:
    write(here, scoring="import os, numpy\nimport near\n", near="def f():\n    from far import g\n", far="", other="")
    assert names("scoring:f") == ["far.py", "near.py", "scoring.py"]
    assert names("./scoring.py:f") == names(f"{here}/scoring.py:f") == names("scoring:f")


def test_a_module_of_a_package_travels_with_the_packages_around_it(here: Path) -> None:
    write(here, mine__in__rewards__in__red="from . import tone\nfrom ..util import x\n", mine__in__rewards__in__tone="")
    write(here, mine__in__util="x = 1\n", mine__in__unused="")
    (here / "mine" / "__init__.py").write_text("y = 2\n")
    code = own_code.find("mine.rewards.red:f", "kind")
    assert code is not None
    assert [file.name for file in code.files] == [
        "mine/__init__.py",
        "mine/rewards/__init__.py",  # which is not there, and without which the import would need the folder
        "mine/rewards/red.py",
        "mine/rewards/tone.py",
        "mine/util.py",
    ]
    assert own_code.load(code).__name__ == "mine.rewards.red"
    assert sys.modules["mine"].y == 2


def test_files_are_imported_where_they_are_not_on_the_disk_and_are_what_they_were(here: Path) -> None:
    write(here, my_scores="from my_constant import SEVEN\n\ndef f():\n    return SEVEN\n", my_constant="SEVEN = 7\n")
    travelling = pickle.dumps(own_code.find("my_scores.py:f", "kind"))
    for path in here.iterdir():
        path.unlink()
    assert own_code.load(pickle.loads(travelling)).f() == 7

    write(here, my_scores="from my_constant import SEVEN\n\ndef f():\n    return SEVEN\n", my_constant="SEVEN = 8\n")
    changed = own_code.find("my_scores.py:f", "kind")
    assert changed is not None
    assert changed.digest != pickle.loads(travelling).digest
    assert own_code.load(changed).f() == 8


def test_a_file_that_is_called_as_a_library_does_not_take_its_place(here: Path) -> None:
    write(here, random="def f():\n    import random\n    return random.Random(0)\n")
    code = own_code.find("random.py:f", "kind")
    assert code is not None
    import random

    assert isinstance(own_code.load(code).f(), random.Random)


def test_what_is_installed_does_not_travel(here: Path) -> None:
    write(here, math="")
    for spec in ("math:sqrt", "numpy.linalg:norm", "solrl_ray.testbed.world:draw"):
        assert own_code.find(spec, "kind") is None


def test_files_are_stored_by_their_digest_and_read_back(here: Path) -> None:
    write(here, my_scores="import near_by\n", near_by="x = 1\n", package__in__deep="")
    for spec in ("my_scores:f", "./my_scores.py:f", "package.deep:f"):
        code = own_code.find(spec, "kind")
        assert code is not None
        own_code.write(code, here / "code")
        stored = own_code.read(code.digest, spec, here / "code")
        assert stored is not None
        assert (stored.entry, stored.digest) == (code.entry, code.digest)
        assert [file.module for file in stored.files] == [file.module for file in code.files]
        (here / "code" / code.digest / code.files[-1].name).write_text("altered = 1\n")
        assert own_code.read(code.digest, spec, here / "code") is None
    assert own_code.read("0" * 64, "my_scores:f", here / "code") is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("./no.py:f", r"^kind is './no.py:f', but there is no file .*/no.py\.$"),
        ("nowhere:f", r"^kind is 'nowhere:f', but the module nowhere is neither in .* nor installed"),
        ("wrong.py:f", r"wrong.py, line 2, is not Python: "),
        ("wrong.py", r"not of the form 'module:function' or 'file.py:function'"),
        ("wrong.py:", r"not of the form"),
        ("bytes.py:f", r"bytes.py cannot be read: "),
    ],
)
def test_what_cannot_be_found_is_told_by_its_key(here: Path, spec: str, message: str) -> None:
    write(here, wrong="x = 1\ndef f(:\n")
    (here / "bytes.py").write_bytes(b"x = '\xff'\n")
    with pytest.raises(UserError, match=message):
        own_code.find(spec, "kind")
