"""A user's own functions: how their files are found, travel, and are imported elsewhere."""

from __future__ import annotations

import pickle
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from solrl_ray.common import own_code
from solrl_ray.common.own_code import OwnCode
from solrl_ray.errors import UserError
from tests.support.documents import ROOT


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(spec: str) -> OwnCode:
    code = own_code.find(spec, "kind")
    assert code is not None
    return code


def names(spec: str) -> list[str]:
    return [file.name for file in found(spec).files]


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
    code = found("mine.rewards.red:f")
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
    travelling = pickle.dumps(found("my_scores.py:f"))
    for path in here.iterdir():
        path.unlink()
    assert own_code.load(pickle.loads(travelling)).f() == 7

    write(here, my_scores="from my_constant import SEVEN\n\ndef f():\n    return SEVEN\n", my_constant="SEVEN = 8\n")
    changed = found("my_scores.py:f")
    assert changed.texts != pickle.loads(travelling).texts
    assert own_code.load(changed).f() == 8
    assert own_code.load(pickle.loads(travelling)).f() == 7


def test_a_file_that_is_called_as_a_library_does_not_take_its_place(here: Path) -> None:
    write(here, random="def f():\n    import random\n    return random.Random(0)\n")
    code = found("random.py:f")
    import random

    assert isinstance(own_code.load(code).f(), random.Random)


def test_what_is_installed_does_not_travel(here: Path) -> None:
    write(here, math="")
    for spec in ("math:sqrt", "numpy.linalg:norm", "solrl_ray.testbed.world:draw"):
        assert own_code.find(spec, "kind") is None


def test_child_processes_can_import_the_files(here: Path) -> None:
    text = (
        "from multiprocessing import get_context\nfrom my_twice import twice\n\ndef one(x):\n    return twice(x) + 1\n"
    )
    text += "\ndef f():\n    with get_context('spawn').Pool(1) as pool:\n"
    text += "        return pool.map_async(one, [1, 2]).get(60)\n"
    write(here, pooled=text, my_twice="def twice(x):\n    return 2 * x\n")
    code = found("pooled.py:f")
    for path in here.iterdir():
        path.unlink()
    assert own_code.load(code).f() == [3, 5]


def test_what_cannot_be_pickled_and_what_is_imported_late_works(here: Path) -> None:
    text = "import functools, threading\nLOCK = threading.Lock()\n\n@functools.cache\ndef five():\n    return 5\n"
    text += "\ndef f():\n    from my_late import TWO\n    with LOCK:\n        return five() + TWO\n"
    write(here, locked=text, my_late="TWO = 2\n")
    travelling = pickle.dumps(found("locked.py:f"))
    for path in here.iterdir():
        path.unlink()
    assert own_code.load(pickle.loads(travelling)).f() == 7


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(here))
    write(here, one="def f():\n    return 1\n")
    load = "from solrl_ray.common import own_code; assert own_code.load(own_code.find('one.py:f', '')).f() == 1; "

    def folders() -> list[Path]:
        return list(here.glob("solrl-code-*"))

    subprocess.run([sys.executable, "-c", load], check=True, cwd=here)
    assert folders() == []
    kill = "import os, subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True); "
    kill += "os.kill(os.getpid(), 9)"
    ended = subprocess.run([sys.executable, "-c", load + kill, load], cwd=here)
    assert ended.returncode == -9
    assert len(folders()) == 1
    subprocess.run([sys.executable, "-c", load], check=True, cwd=here)
    assert folders() == []


def test_files_are_imported_from_a_disk_without_locks(here: Path) -> None:
    write(here, one="def f():\n    return 1\n")
    load = "from solrl_ray.common import own_code; print(own_code.load(own_code.find('one.py:f', '')).f())"
    without = [sys.executable, str(ROOT / "tests/support/without_locks.py"), "ENOLCK"]
    done = subprocess.run([*without, sys.executable, "-c", load], capture_output=True, text=True, cwd=here)
    if done.returncode == 77:
        pytest.skip("this kernel takes no seccomp filter")
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_functions_in_one_package_share_its_modules(here: Path) -> None:
    write(here, mine2__in__shared="LIST = []\n", mine2__in__a="from mine2.shared import LIST\n")
    write(here, mine2__in__b="from . import shared\n")
    a, b = (own_code.load(found(f"mine2.{name}:f")) for name in "ab")
    assert a.LIST is b.shared.LIST


def test_a_traceback_has_the_users_path_and_line_also_where_there_is_no_such_file(here: Path) -> None:
    write(here, failing="def f():\n    raise KeyError('here')  # as it was sent\n")
    code = found("failing.py:f")
    (here / "failing.py").write_text("\n\nedited = 1\n")
    with pytest.raises(KeyError) as raised:
        own_code.load(code).f()
    *_, frame = traceback.extract_tb(raised.value.__traceback__)
    assert (frame.filename, frame.lineno) == (str(here / "failing.py"), 2)
    assert frame.line == "raise KeyError('here')  # as it was sent"


def test_files_are_stored_below_their_module_and_read_back(here: Path) -> None:
    write(here, my_scores="import near_by\n", near_by="x = 1\n", package__in__deep="")
    for spec in ("my_scores:f", "./my_scores.py:f", "package.deep:f"):
        code = found(spec)
        own_code.write(code, here / "code")
        stored = own_code.read(spec, here / "code")
        assert stored is not None
        assert (stored.entry, stored.texts) == (code.entry, code.texts)
        assert [file.module for file in stored.files] == [file.module for file in code.files]
        (here / "code" / code.entry / code.files[-1].name).write_text("altered = 1\n")
        own_code.write(code, here / "code")
        again = own_code.read(spec, here / "code")
        assert again is not None
        assert again.texts == code.texts
    assert own_code.read("other:f", here / "code") is None


def test_a_file_that_its_helper_imports_by_its_name_is_read_back_under_both_names(here: Path) -> None:
    write(
        here,
        my_red="RED = 3\n\ndef f():\n    import near_red\n    return near_red.RED\n",
        near_red="from my_red import RED",
    )
    own_code.write(found("my_red.py:f"), here / "code")
    for path in here.glob("*.py"):
        path.unlink()
    stored = own_code.read("my_red.py:f", here / "code")
    assert stored is not None
    assert {file.module for file in stored.files} == {stored.entry, "my_red", "near_red"}
    assert own_code.load(stored).f() == 3


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


def test_a_byte_order_mark_is_no_part_of_the_text(here: Path) -> None:
    (here / "my_marked.py").write_bytes(b"\xef\xbb\xbfdef f():\n    return 7\n")
    code = found("my_marked.py:f")
    assert own_code.load(code).f() == 7
    own_code.write(code, here / "code")
    stored = here / "code" / code.entry / "my_marked.py"
    stored.write_bytes(b"\xef\xbb\xbf" + stored.read_bytes())
    read = own_code.read("my_marked.py:f", here / "code")
    assert read is not None
    assert read.texts == code.texts
