"""Finds the files of a user's Python function, sends them as text, and imports them on workers.

::

    ``mine/my_rewards.py:redness`` or ``my_rewards:redness`` ──► `find` ──► `OwnCode` ──► a worker ──► `load`

The function's file is sent, together with all files that it imports from the same folder. Installed modules are not
sent; they must be installed on every machine.
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
"""Prefix of the folders that `load` imports from."""
SESSION = "session_"
"""Prefix of the file names of functions that were given as objects."""
_OURS = {"solrl_ray", "actors"}


@dataclass(frozen=True, slots=True)
class SourceFile:
    module: str
    """Name under which the file is imported."""
    path: str
    """The user's path, for tracebacks."""
    name: str
    """Path relative to the folder of the search, such as ``mine/__init__.py``."""
    text: str


@dataclass(frozen=True, slots=True)
class OwnCode:
    """The file of a function, and all files that it imports from the same folder."""

    entry: str
    """Name of the module with the function; also the name of its folder in a run folder."""
    files: tuple[SourceFile, ...]

    @property
    def texts(self) -> dict[str, str]:
        return {file.name: file.text for file in self.files}


def split(spec: str, key: str) -> tuple[str, str]:
    """Split a spec into module or file, and function. Raises UserError naming `key` if it has another form."""
    place, _, function = spec.rpartition(":")
    if not place or not function.isidentifier():
        raise UserError(f"{key} is {spec!r}, which is not of the form {FORMS}.")
    return place, function


def names_file(place: str) -> bool:
    """Whether `place` names a file, not a module."""
    return place.endswith(".py") or "/" in place


def find(spec: str, key: str) -> OwnCode | None:
    """The files of a function, with paths relative to the current folder; None if its module is installed.

    Executes nothing. Raises UserError naming `key` if there is no such file or module, or a file is not Python.
    """
    place, _ = split(spec, key)
    if names_file(place):
        file = located(place, key).absolute()
        if not file.is_file():
            raise UserError(f"{key} is {spec!r}, but there is no file {file}.")
        return _with_imports(file.parent, place, file, f"{key} is {spec!r}")
    for folder in dict.fromkeys([Path.cwd(), *(Path(entry).absolute() for entry in sys.path if entry)]):
        module_file = None if _is_environment(folder) else _file_of(folder, place)
        if module_file:
            return _with_imports(folder, place, module_file, f"{key} is {spec!r}")
    top = place.partition(".")[0]
    if top not in sys.modules and importlib.util.find_spec(top) is None:
        raise UserError(
            f"{key} is {spec!r}, but the module {top} is neither in {Path.cwd()} nor installed; "
            "name a file in another folder by its path, such as mine/my_rewards.py:function."
        )
    return None


def by_value(function: Callable[..., Any], key: str) -> tuple[str, OwnCode]:
    """The spec and the code of a function object, for a configuration made in Python.

    A function from a user's file is named by that file. Any other function (from a notebook cell, a closure, a method)
    is pickled by value into a new file. Like all user files, that file is code: it is executed where the run scores
    samples, and when the run resumes.

    Raises UserError naming `key` if the function cannot be pickled.
    """
    import cloudpickle

    name, module = getattr(function, "__name__", "reward"), sys.modules.get(getattr(function, "__module__", ""))
    file = getattr(module, "__file__", None) if module and module.__name__ != "__main__" else None
    if file and getattr(module, name, None) is function:
        spec = f"{file if _is_own(Path(file)) else module.__name__}:{name}"  # type: ignore[union-attr]
        if code := find(spec, key):
            return spec, code
    own = [m for m in list(sys.modules.values()) if _is_own(Path(getattr(m, "__file__", None) or sys.prefix))]
    for own_module in own:
        cloudpickle.register_pickle_by_value(own_module)
    try:
        pickled = base64.b64encode(cloudpickle.dumps(function)).decode()
    except Exception as error:  # objects that the function refers to may raise any error
        raise UserError(
            f"{key} is {name}, which cannot be sent to the workers: {type(error).__name__}: {error}."
        ) from error
    finally:
        for own_module in own:
            cloudpickle.unregister_pickle_by_value(own_module)
    name = re.sub(r"\W", "_", name).strip("_")
    name = name if name and not keyword.iskeyword(name) else "reward"  # for a lambda
    text = f"import base64, cloudpickle\n\n{name} = cloudpickle.loads(base64.b64decode({pickled!r}))\n"
    place = f"{SESSION}{name}_{short_digest(text.encode())}.py"
    return f"{place}:{name}", OwnCode(_entry(place), (SourceFile(_entry(place), place, place, text),))


def is_by_value(spec: str) -> bool:
    """Whether the spec was made by `by_value`, so that there is no user's file to show."""
    return spec.startswith(SESSION)


def short_digest(content: bytes) -> str:
    """The first 12 hex digits of SHA-256, for file names."""
    return hashlib.sha256(content).hexdigest()[:12]


def _is_own(file: Path) -> bool:
    """Whether a module's file is the user's: neither installed, nor Python's, nor this package's."""
    return (
        not any(map(_is_environment, file.parents))
        and not file.is_relative_to(sys.prefix)
        and not (file.is_relative_to(sys.base_prefix) or file.is_relative_to(Path(__file__).parents[2]))
    )


def load(code: OwnCode) -> ModuleType:
    """Import the files and return the function's module; errors of the files are passed on.

    They are imported from a temporary folder on Python's path, so child processes can import them, too. `execute` gives
    them the user's paths.
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
                sys.modules.pop(file.module, None)  # a module of the same name from another folder
                _LOADED[file.module] = file
        importlib.invalidate_caches()
        return importlib.import_module(code.entry)


def _import_from_a_new_folder() -> None:
    for module in _LOADED:
        sys.modules.pop(module, None)
    _LOADED.clear()
    for left in Path(tempfile.gettempdir()).glob(f"{TEMPORARY}*/lock"):
        with suppress(OSError), left.open("r+b") as file:  # remove folders of killed processes: their lock is free
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left.parent)
    folder = Path(tempfile.mkdtemp(prefix=TEMPORARY))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    lock = (folder / "unlocked").open("wb")
    with suppress(OSError):  # on a disk without locks, no process can lock it, so none removes the folder
        fcntl.flock(lock, fcntl.LOCK_EX)
    (folder / "unlocked").rename(folder / "lock")  # renamed only now, so that no process finds it unlocked
    _FOLDERS[folder] = lock
    sys.path.insert(0, str(folder))


def execute(module: dict[str, Any], path: str, text: str) -> None:
    """Execute the user's file in a module's namespace, as if imported from `path`, which need not exist here."""
    module["__file__"] = path
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)  # lines of tracebacks
    exec(compile(text, path, "exec", dont_inherit=True), module)


def write(code: OwnCode, folder: Path) -> None:
    """Store the files in a folder below `folder`, unless it already holds them undamaged."""
    target, contents = folder / code.entry, {name: text.encode() for name, text in code.texts.items()}
    contents[DIGESTS] = json.dumps(_digests(code), indent=1).encode()
    try:
        whole = all((target / name).read_bytes() == content for name, content in contents.items())
    except OSError:
        whole = False
    if not whole:
        replace_folder(target, contents)


def read(spec: str, folder: Path) -> OwnCode | None:
    """The files of a function that `write` stored; None if it stored none. Executes nothing.

    Raises UserError if a stored file was altered or is missing.
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
        "them, or remove that folder to continue with your current files."
    )


def _digests(code: OwnCode) -> dict[str, str]:
    """File name → SHA-256 of its text."""
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sorted(code.texts.items())}


DIGESTS = "digests.json"
"""Name of the file with the digests of stored files, in the same folder."""
_LOADED = dict[str, SourceFile]()
"""Module → its file."""
_FOLDERS = dict[Path, IO[bytes]]()
"""Folders that modules were imported from → their locks; the last one holds the modules of `_LOADED`."""
_LOCK = threading.RLock()


def _is_environment(folder: Path) -> bool:
    """Whether `folder` holds installed packages."""
    installed = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return folder in installed or bool({"site-packages", "dist-packages"} & set(folder.parts))


def _file_of(folder: Path, module: str) -> Path | None:
    """A module's file in `folder`, or None. Names of Python's modules and of this package are never the user's."""
    top, path = module.partition(".")[0], folder.joinpath(*module.split("."))
    if top in _OURS or top in sys.stdlib_module_names:
        return None
    return next((p for p in (path / "__init__.py", path.with_name(f"{path.name}.py")) if p.is_file()), None)


def _entry(place: str) -> str:
    """Name of the module with a function; for a file, a unique name."""
    if not names_file(place):
        return place
    stem, digest = re.sub(r"\W", "_", PurePosixPath(place).stem), hashlib.sha256(place.encode()).hexdigest()
    return f"own_{stem}_{digest[:8]}"


def _with_imports(folder: Path, place: str, file: Path, subject: str) -> OwnCode:
    """`file` and all files that it imports from `folder`, directly or indirectly. `subject` begins error messages."""
    sources, waiting = dict[str, SourceFile](), [(_entry(place), file)]
    while waiting:
        module, path = waiting.pop()
        if module in sources:
            continue
        try:
            text = path.read_text(encoding="utf-8-sig")
            tree = ast.parse(text, str(path))
        except SyntaxError as error:
            raise UserError(f"{subject}, but {path}, line {error.lineno}, is not Python: {error.msg}.") from None
        except (OSError, ValueError) as error:
            raise UserError(f"{subject}, but {path} cannot be read: {error}.") from None
        sources[module] = SourceFile(module, str(path), path.relative_to(folder).as_posix(), text)
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        names = {part for name in (module, *_imported(tree, package)) for part in (name, *_parents(name))}
        waiting += [(name, other) for name in sorted(names) if (other := _file_of(folder, name))]
    packages = {parent for module in sources for parent in _parents(module)}
    for name in packages - sources.keys():  # folders without __init__.py
        path = folder.joinpath(*name.split("."), "__init__.py")
        sources[name] = SourceFile(name, str(path), path.relative_to(folder).as_posix(), "")
    return OwnCode(_entry(place), tuple(sorted(sources.values(), key=lambda source: source.name)))


def _imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Imported names, which may be modules."""
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
