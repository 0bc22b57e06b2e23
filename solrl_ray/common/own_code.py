"""The user's own Python functions: their files are found, sent as text, and imported where needed.

    ``mine/my_rewards.py:redness`` or ``my_rewards:redness`` ──► `find` ──► `OwnCode` ──► a worker ──► `load`

The function's file is sent, with everything it imports from the same folder. An installed module is not sent: it must
be installed on every machine.
"""

from __future__ import annotations

import ast
import atexit
import base64
import fcntl
import hashlib
import importlib
import importlib.util
import json
import keyword
import linecache
import re
import shutil
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import IO, Any

from solrl_ray.common.files import located, replace_folder
from solrl_ray.errors import UserError

FORMS = "'module:function' or 'file.py:function'"
TEMPORARY = "solrl-code-"
"""Beginning of the name of the folders that `load` imports from."""
SESSION = "session_"
"""Beginning of the file names of functions that were given as objects."""
_OURS = {"solrl_ray", "actors"}


@dataclass(frozen=True, slots=True)
class SourceFile:
    module: str
    """The name under which it is imported."""
    path: str
    """The user's path, for tracebacks."""
    name: str
    """Path below the folder that it was found in, such as ``mine/__init__.py``."""
    text: str


@dataclass(frozen=True, slots=True)
class OwnCode:
    """The file of a function, and the files that it imports from the same folder."""

    entry: str
    """The module with the function; also its name in a run folder."""
    files: tuple[SourceFile, ...]

    @property
    def texts(self) -> dict[str, str]:
        return {file.name: file.text for file in self.files}


def split(spec: str, key: str) -> tuple[str, str]:
    """The module or file, and the function. Raises `UserError` naming `key` for any other form."""
    place, _, function = spec.rpartition(":")
    if not place or not function.isidentifier():
        raise UserError(f"{key} is {spec!r}, which is not of the form {FORMS}.")
    return place, function


def names_file(place: str) -> bool:
    """Whether it is a file, not a module."""
    return place.endswith(".py") or "/" in place


def find(spec: str, key: str) -> OwnCode | None:
    """The files of a function, with paths relative to the present folder; None if its module is installed.

    Executes nothing. Raises `UserError` naming `key`: no such file or module, a file that is not Python.
    """
    place, _ = split(spec, key)
    if names_file(place):
        file = located(place, key).absolute()
        if not file.is_file():
            raise UserError(f"{key} is {spec!r}, but there is no file {file}.")
        return _with_imports(file.parent, place, file, f"{key} is {spec!r}")
    for folder in dict.fromkeys([Path.cwd(), *(Path(each).absolute() for each in sys.path if each)]):
        found = None if _is_environment(folder) else _file_of(folder, place)
        if found:
            return _with_imports(folder, place, found, f"{key} is {spec!r}")
    top = place.partition(".")[0]
    if top not in sys.modules and importlib.util.find_spec(top) is None:
        raise UserError(
            f"{key} is {spec!r}, but the module {top} is neither in {Path.cwd()} nor installed; "
            "a file elsewhere is named by its path, such as mine/my_rewards.py:function."
        )
    return None


def by_value(function: Callable[..., Any], key: str) -> tuple[str, OwnCode]:
    """The spec and the code of a function object, for a configuration made in Python.

    A function of a user's file is named by that file. Any other one (of a notebook cell, a closure, a method) becomes a
    file of its own that holds its pickle, by value. Like every own file it is code, which is executed where the run
    scores and when it resumes.

    Raises UserError naming `key` if it cannot be pickled.
    """
    import cloudpickle

    name, module = getattr(function, "__name__", "reward"), sys.modules.get(getattr(function, "__module__", ""))
    file = getattr(module, "__file__", None) if module and module.__name__ != "__main__" else None
    if file and getattr(module, name, None) is function:
        spec = f"{file if _is_own(Path(file)) else module.__name__}:{name}"  # type: ignore[union-attr]
        if code := find(spec, key):
            return spec, code
    own = [m for m in list(sys.modules.values()) if _is_own(Path(getattr(m, "__file__", None) or sys.prefix))]
    for each in own:
        cloudpickle.register_pickle_by_value(each)
    try:
        pickled = base64.b64encode(cloudpickle.dumps(function)).decode()
    except Exception as error:  # whatever the objects that it refers to raise
        raise UserError(
            f"{key} is {name}, which cannot be sent to the workers: {type(error).__name__}: {error}."
        ) from error
    finally:
        for each in own:
            cloudpickle.unregister_pickle_by_value(each)
    name = re.sub(r"\W", "_", name).strip("_")
    name = name if name and not keyword.iskeyword(name) else "reward"  # of a lambda
    text = f"import base64, cloudpickle\n\n{name} = cloudpickle.loads(base64.b64decode({pickled!r}))\n"
    place = f"{SESSION}{name}_{short_digest(text.encode())}.py"
    return f"{place}:{name}", OwnCode(_entry(place), (SourceFile(_entry(place), place, place, text),))


def is_by_value(spec: str) -> bool:
    """Whether `by_value` made it: there is no file of the user's to look at."""
    return spec.startswith(SESSION)


def short_digest(content: bytes) -> str:
    """12 hex digits of SHA-256, for the names of files."""
    return hashlib.sha256(content).hexdigest()[:12]


def _is_own(file: Path) -> bool:
    """Whether it is a module of the user's: neither installed, nor Python's, nor this package's."""
    return (
        not any(map(_is_environment, file.parents))
        and not file.is_relative_to(sys.prefix)
        and not (file.is_relative_to(sys.base_prefix) or file.is_relative_to(Path(__file__).parents[2]))
    )


def load(code: OwnCode) -> ModuleType:
    """Import the files and return the function's module; raises whatever they raise.

    They are imported from a folder of this process on Python's path, so child processes can import them, too.
    `execute` gives them the user's paths.
    """
    with _LOCK:
        if not _FOLDERS or any(_LOADED.get(file.module, file) != file for file in code.files):
            _import_from_a_new_folder()
        for file in code.files:
            if file.module not in _LOADED:
                target = next(reversed(_FOLDERS)).joinpath(*file.module.split("."))
                target = (
                    target / "__init__.py"
                    if file.name.endswith("__init__.py")
                    else target.with_name(f"{target.name}.py")
                )
                target.parent.mkdir(parents=True, exist_ok=True)
                ours = f"__import__({__name__!r}, fromlist=['execute'])"
                target.write_text(f"{ours}.execute(globals(), {file.path!r}, {file.text!r})\n", encoding="utf-8")
                sys.modules.pop(file.module, None)  # one from elsewhere
                _LOADED[file.module] = file
        importlib.invalidate_caches()
        return importlib.import_module(code.entry)


def _import_from_a_new_folder() -> None:
    for module in _LOADED:
        sys.modules.pop(module, None)
    _LOADED.clear()
    for left in Path(tempfile.gettempdir()).glob(f"{TEMPORARY}*/lock"):
        with suppress(OSError), left.open("r+b") as file:  # of a process that was killed, unless its lock is held
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left.parent)
    folder = Path(tempfile.mkdtemp(prefix=TEMPORARY))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    lock = (folder / "unlocked").open("wb")
    with suppress(OSError):  # a disk without locks: nobody can lock it there, so nobody removes it
        fcntl.flock(lock, fcntl.LOCK_EX)
    (folder / "unlocked").rename(folder / "lock")  # so nobody finds it unlocked
    _FOLDERS[folder] = lock
    sys.path.insert(0, str(folder))


def execute(module: dict[str, Any], path: str, text: str) -> None:
    """Execute the user's file in a module's namespace, as if it were imported from `path`, also where there is none."""
    module["__file__"] = path
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)  # lines of tracebacks
    exec(compile(text, path, "exec", dont_inherit=True), module)


def write(code: OwnCode, folder: Path) -> None:
    """Store the files in a folder below `folder`, unless they are there undamaged."""
    target, contents = folder / code.entry, {name: text.encode() for name, text in code.texts.items()}
    contents[DIGESTS] = json.dumps(_digests(code), indent=1).encode()
    try:
        whole = all((target / name).read_bytes() == content for name, content in contents.items())
    except OSError:
        whole = False
    if not whole:
        replace_folder(target, contents)


def read(spec: str, folder: Path) -> OwnCode | None:
    """What `write` stored of a function; None if nothing was stored. Executes nothing.

    Raises UserError if a stored file was altered, or is missing.
    """
    place = spec.rpartition(":")[0]
    target = folder / _entry(place)
    file = target / PurePosixPath(place).name if names_file(place) else _file_of(target, place)
    if not target.is_dir():
        return None
    with suppress(UserError, OSError, ValueError):
        code = _with_imports(target, place, file, "") if file else None
        stated = target / DIGESTS
        if code is not None and stated.is_file() and json.loads(stated.read_bytes()) == _digests(code):
            return code
    raise UserError(
        f"The files of {spec} in {target} are not those that the run stored: one was altered or is missing. Restore "
        "them, or remove that folder to continue with your present files."
    )


def _digests(code: OwnCode) -> dict[str, str]:
    """File name → SHA-256 of its text."""
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sorted(code.texts.items())}


DIGESTS = "digests.json"
"""Name of the file beside stored ones with their digests."""
_LOADED = dict[str, SourceFile]()
"""Module → its file."""
_FOLDERS = dict[Path, IO[bytes]]()
"""Folders that modules were imported from, and their locks; the last one holds those of `_LOADED`."""
_LOCK = threading.RLock()


def _is_environment(folder: Path) -> bool:
    """Whether `folder` holds installed packages."""
    installed = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return folder in installed or bool({"site-packages", "dist-packages"} & set(folder.parts))


def _file_of(folder: Path, module: str) -> Path | None:
    """A module's file; None also for modules of Python and of this package, whose names the user's cannot take."""
    top, place = module.partition(".")[0], folder.joinpath(*module.split("."))
    if top in _OURS or top in sys.stdlib_module_names:
        return None
    return next((p for p in (place / "__init__.py", place.with_name(f"{place.name}.py")) if p.is_file()), None)


def _entry(place: str) -> str:
    """The module name of a function; for a file, a name that no other module has."""
    if not names_file(place):
        return place
    stem, digest = re.sub(r"\W", "_", PurePosixPath(place).stem), hashlib.sha256(place.encode()).hexdigest()
    return f"own_{stem}_{digest[:8]}"


def _with_imports(folder: Path, place: str, file: Path, said: str) -> OwnCode:
    """`file` and all that it imports from `folder`, directly or indirectly, by name."""
    found, waiting = dict[str, SourceFile](), [(_entry(place), file)]
    while waiting:
        module, path = waiting.pop()
        if module in found:
            continue
        try:
            text = path.read_text(encoding="utf-8-sig")
            tree = ast.parse(text, str(path))
        except SyntaxError as error:
            raise UserError(f"{said}, but {path}, line {error.lineno}, is not Python: {error.msg}.") from None
        except (OSError, ValueError) as error:
            raise UserError(f"{said}, but {path} cannot be read: {error}.") from None
        found[module] = SourceFile(module, str(path), path.relative_to(folder).as_posix(), text)
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        names = {part for name in (module, *_imported(tree, package)) for part in (name, *_parents(name))}
        waiting += [(name, other) for name in sorted(names) if (other := _file_of(folder, name))]
    for name in {above for module in found for above in _parents(module)} - found.keys():  # folders without __init__.py
        path = folder.joinpath(*name.split("."), "__init__.py")
        found[name] = SourceFile(name, str(path), path.relative_to(folder).as_posix(), "")
    return OwnCode(_entry(place), tuple(sorted(found.values(), key=lambda each: each.name)))


def _imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Names that may be modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names if base)


def _parents(module: str) -> Iterator[str]:
    while module := module.rpartition(".")[0]:
        yield module
