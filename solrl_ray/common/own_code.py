"""The user's own Python functions: their files are found, sent as text, and imported where needed.

    ``mine/my_rewards.py:redness`` or ``my_rewards:redness`` ──► `find` ──► `OwnCode` ──► a worker ──► `load`

The function's file is sent, with everything it imports from the same folder. An installed module is not sent: it must
be installed on every machine.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import re
import sys
import sysconfig
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

from solrl_ray.common.files import located, replace_folder
from solrl_ray.errors import UserError

FORMS = "'module:function' or 'file.py:function'"
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
    """The module with the function."""
    files: tuple[SourceFile, ...]

    @property
    def digest(self) -> str:
        """SHA-256, in hex, over names and texts."""
        digest = hashlib.sha256(f"{self.entry}\n".encode())
        for file in self.files:
            digest.update(f"{file.name} {len(file.text.encode())}\n{file.text}".encode())
        return digest.hexdigest()


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
        return OwnCode(_entry(place), _with_imports(file.parent, _entry(place), file, f"{key} is {spec!r}"))
    for folder in dict.fromkeys([Path.cwd(), *(Path(each).absolute() for each in sys.path if each)]):
        found = None if _is_environment(folder, place) else _file_of(folder, place)
        if found:
            return OwnCode(place, _with_imports(folder, place, found, f"{key} is {spec!r}"))
    top = place.partition(".")[0]
    if top not in sys.modules and importlib.util.find_spec(top) is None:
        raise UserError(
            f"{key} is {spec!r}, but the module {top} is neither in {Path.cwd()} nor installed; "
            "a file elsewhere is named by its path, such as mine/my_rewards.py:function."
        )
    return None


def load(code: OwnCode) -> ModuleType:
    """Import the files and return the function's module; raises whatever they raise.

    Replaces a module of the same name from elsewhere: the files are imported like a script's neighbours.
    """
    with _LOCK:
        if _IMPORTER not in sys.meta_path:
            sys.meta_path.insert(0, _IMPORTER)
        if not all(_is_loaded(file) for file in code.files):
            for file in code.files:
                sys.modules.pop(file.module, None)
                _IMPORTER.files[file.module] = file
        return importlib.import_module(code.entry)


def write(code: OwnCode, folder: Path) -> None:
    """Store the files in a folder below `folder` named by their digest, unless they are there undamaged."""
    target, contents = folder / code.digest, {file.name: file.text.encode() for file in code.files}
    try:
        whole = all((target / name).read_bytes() == content for name, content in contents.items())
    except OSError:
        whole = False
    if not whole:
        replace_folder(target, contents)


def read(digest: str, spec: str, folder: Path) -> OwnCode | None:
    """What `write` stored; None if it is missing or altered.

    Found as `find` does: a file imported under two names is stored once.
    """
    target, place = folder / digest, spec.rpartition(":")[0]
    file = target / PurePosixPath(place).name if names_file(place) else _file_of(target, place)
    try:
        code = OwnCode(_entry(place), _with_imports(target, _entry(place), file, "")) if file else None
    except UserError:
        return None
    return code if code and code.digest == digest else None


class _Importer(MetaPathFinder, SourceLoader):  # type: ignore[misc]  # typeshed: its bases' signatures differ
    """Imports modules from texts in memory, without bytecode."""

    def __init__(self) -> None:
        self.files: dict[str, SourceFile] = {}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        file = self.files.get(fullname)
        if file is None:
            return None
        folders = [str(Path(file.path).parent)] if Path(file.path).name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            fullname, file.path, loader=self, submodule_search_locations=folders
        )

    def get_filename(self, fullname: str) -> str:
        return self.files[fullname].path

    def get_data(self, path: Any) -> bytes:
        for file in self.files.values():
            if file.path == path:
                return file.text.encode()
        raise OSError(f"{path} is not among the user's files")


_IMPORTER = _Importer()
_LOCK = threading.RLock()


def _is_loaded(file: SourceFile) -> bool:
    there, known = sys.modules.get(file.module), _IMPORTER.files.get(file.module)
    return there is not None and (known == file if known else getattr(there, "__file__", None) == file.path)


def _is_environment(folder: Path, module: str) -> bool:
    """Whether `folder` holds installed packages or this package."""
    top = module.partition(".")[0]
    if top in _OURS or top in sys.stdlib_module_names:
        return True
    installed = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return folder in installed or bool({"site-packages", "dist-packages"} & set(folder.parts))


def _file_of(folder: Path, module: str) -> Path | None:
    place = folder.joinpath(*module.split("."))
    return next((p for p in (place / "__init__.py", place.with_name(f"{place.name}.py")) if p.is_file()), None)


def _entry(place: str) -> str:
    """The module name of a function; for a file, a name that no other module has."""
    return "own_" + re.sub(r"\W", "_", PurePosixPath(place).stem) if names_file(place) else place


def _with_imports(folder: Path, entry: str, file: Path, said: str) -> tuple[SourceFile, ...]:
    """`file` and all that it imports from `folder`, directly or indirectly, by name."""
    found, waiting = dict[str, SourceFile](), [(entry, file)]
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
        for name in _imported(tree, module, package):
            place = None if _is_environment(folder, name) else _file_of(folder, name)
            if place:
                waiting.append((name, place))
    for name in {above for module in found for above in _parents(module)} - found.keys():  # folders without __init__.py
        path = folder.joinpath(*name.split("."), "__init__.py")
        found[name] = SourceFile(name, str(path), path.relative_to(folder).as_posix(), "")
    return tuple(sorted(found.values(), key=lambda each: each.name))


def _imported(tree: ast.AST, module: str, package: str) -> Iterator[str]:
    """Names that may be modules: all imports in the file, and their parent packages."""
    yield from _parents(module)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from (alias.name, *_parents(alias.name))
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            if base:
                yield from (base, *_parents(base), *(f"{base}.{alias.name}" for alias in node.names))


def _parents(module: str) -> Iterator[str]:
    while module := module.rpartition(".")[0]:
        yield module
