"""Reads a run's prompt files, gives prompts their ids, and chooses an iteration's prompts and the shapes of samples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from solrl_ray.common.deadlines import in_time
from solrl_ray.common.files import READ_SECONDS, check_regular, stand_in, utf8_text
from solrl_ray.config.fleet import Deadlines
from solrl_ray.config.loading import Sources
from solrl_ray.config.problems import counted
from solrl_ray.config.resolution import as_shape
from solrl_ray.config.schema import Config, Model
from solrl_ray.errors import UserError
from solrl_ray.models.paths import BUILTIN, resolve, shipped
from solrl_ray.prompts import references
from solrl_ray.records import Address, Prompt, Reference, SampleShape
from solrl_ray.sampling.noise import permutation, uniform

CHOICE = "prompts"
"""Purpose of the addresses that choose an iteration's prompts."""


def prompt_id(text: str, references: Sequence[Reference] = ()) -> str:
    """16 hex digits of BLAKE2b-64 over the UTF-8 text and, each after a zero byte, the digests of its pictures."""
    whole = "\0".join([text, *(reference.digest for reference in references)])
    return hashlib.blake2b(whole.encode(), digest_size=8).hexdigest()


def negative_prompt(model: Model, seen: Sequence[Reference] = ()) -> Prompt | None:
    """The prompt of `model.cfg` against which one with the references `seen` is guided; None without guidance."""
    text = model.cfg.negative_prompt
    return Prompt(id=prompt_id(text, seen), text=text, references=tuple(seen)) if model.cfg.is_on else None


class _Line(NamedTuple):
    """A prompt, whose reference pictures are not read yet."""

    number: int
    text: str
    shape: SampleShape | None = None
    paths: tuple[str, ...] = ()


def read_prompts(
    path: str,
    key: str = "prompts",
    shapes: Collection[SampleShape] = (),
    seen: int | None = None,
    deadlines: Deadlines | None = None,
) -> list[Prompt]:
    """Read a file with one prompt a line, or, if it ends in ``.jsonl``, one object with key ``text`` a line.

    White space around a prompt is dropped, empty lines are skipped, a repeated prompt counts once, at its first place.
    An object may have the key ``resolution``, the shape of the prompt's samples, and the key ``reference``, the paths
    of pictures, which count from the file's folder. Other keys are ignored. `path` may be ``builtin:…``.

    Args:
        shapes: those that a prompt may name; empty: any.
        seen: reference pictures that each prompt must have; all their pixels are looked at. None: any number.
        deadlines: those of the run; `encode` is also that of looking at a picture.

    Raises RunError if a disk hangs; `UserError` naming `key` and the file if it is missing, not UTF-8, malformed or
    without a prompt, or if a prompt names another shape, or comes with two, or has a picture that cannot be taken
    (`references.opened`).
    """
    lines = in_time(lambda: _lines(path, key, shapes), what=f"reading {path}", seconds=READ_SECONDS)
    place = f"{key}: {resolve(path)}, line "
    for line in lines:
        if seen is not None and len(line.paths) != seen:
            raise UserError(_other_number(line, place, seen))
    named = [(file, f"{place}{line.number}") for line in lines for file in line.paths]
    found = iter(references.known(named, decode=seen is not None, deadlines=deadlines) if named else ())
    prompts: dict[str, Prompt] = {}
    for line in lines:
        own = tuple(next(found) for _ in line.paths)
        identity = prompt_id(line.text, own)
        if identity not in prompts:
            prompts[identity] = Prompt(id=identity, text=line.text, shape=line.shape, references=own)
    return list(prompts.values())


def _other_number(line: _Line, place: str, right: int) -> str:
    """Says that a prompt has another number of reference pictures than the model takes."""
    mend = f"give each prompt {right} under 'reference'" if right else "leave them out, or take a model that edits"
    count = len(line.paths)
    had = counted(count, "reference picture") if count else "no reference picture"
    return f"{place}{line.number} has {had}, but model.references is {right}; {mend}."


def _lines(path: str, key: str, shapes: Collection[SampleShape]) -> list[_Line]:
    """The distinct prompts of a file, each at its first place."""
    file = Path(resolve(path))
    if (suffix := file.suffix.lower()) in (".csv", ".tsv", ".json", ".parquet"):
        raise UserError(f"{key} is {path!r}; `solrl prompts import {path}` makes of it the files that a run reads.")
    found: dict[Any, _Line] = {}
    try:
        check_regular(file)
        # Line by line: a file of a million prompts is held once. splitlines() would also break at separators that
        # a prompt may contain.
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if number == 1 and (wrong := stand_in(line.encode())):
                    raise UserError(f"{key} is {path!r}, but {file} {wrong}.")
                if not line.strip():
                    continue
                place = f"{key}: {file}, line {number}"
                read = _of_json(line, number, place, file.parent, shapes) if suffix == ".jsonl" else None
                read = read or _Line(number, line.strip())
                if found.setdefault((read.text, read.paths) if read.paths else read.text, read).shape != read.shape:
                    raise UserError(f"{place} repeats a prompt with another 'resolution'; a prompt has one shape.")
    except UnicodeDecodeError:
        utf8_text(file, f"{key} is {path!r}, but {file}")  # names the line
        raise
    except OSError as error:
        raise UserError(
            f"{key} is {path!r}, but {file} cannot be read ({error.strerror})"
            + ("" if file.is_absolute() else f"; the path counts from this command's folder, {Path.cwd()}")
            + "; give a text file with one prompt a line, "
            "or a .jsonl file with one object a line, its prompt under 'text'"
            + (f"; this package ships {', '.join(shipped('*.txt'))}." if path.startswith(BUILTIN) else ".")
        ) from error
    if not found:
        raise UserError(f"{key} is {path!r}, but {file} holds no prompt.")
    return list(found.values())


def two_prompts(
    config: Config, sources: Sources | None = None
) -> tuple[tuple[str, str], tuple[tuple[bytes, ...], ...]]:
    """The first two held-out prompts, or the only one and the first training prompt, for trying a reward: their texts,
    and the contents of their reference pictures if the model takes some.

    Raises `UserError` if a file of prompts or pictures cannot be read.
    """
    sources, found = sources or Sources(), list[Prompt]()
    for name, path in (("heldout", config.prompts.heldout), ("train", config.prompts.train)):
        if len(found) < 2:
            found += read_prompts(path, f"prompts.{name} ({sources.of(f'prompts.{name}')})")
    first, second = found[:2]
    files = (references.contents(first), references.contents(second)) if config.model.references else ()
    return (first.text, second.text), files


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """SHA-256 (hex) over the prompts' ids, one a line, in their order, with the shapes that their file names."""
    lines = (f"{prompt.id} {prompt.shape}" if prompt.shape else prompt.id for prompt in prompts)
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


def choose(prompts: Sequence[Prompt], run_seed: int, iteration: int, count: int) -> list[Prompt]:
    """The prompts of an iteration: the first `count` of an addressed permutation, drawn again each iteration.

    Raises `ValueError` if there are fewer than `count`.
    """
    if count > len(prompts):
        raise ValueError(f"an iteration takes {count} prompts, but there are {len(prompts)}")
    address = Address(run_seed=run_seed, purpose=CHOICE, iteration=iteration)
    return [prompts[i] for i in permutation(address, len(prompts))[:count]]


def shape_of(prompt: Prompt, shapes: Sequence[SampleShape], run_seed: int) -> SampleShape:
    """The shape that the prompt's file names, else one of `shapes`, each with the same probability.

    The draw depends on run seed and prompt alone: previews, samples and evaluations of a prompt have one shape, in
    every iteration.

    Raises ValueError if the file names a shape that is none of `shapes`.
    """
    if (named := prompt.shape) is not None:
        if found := next((shape for shape in shapes if named.is_size_of(shape)), None):
            return found
        raise ValueError(f"prompt {prompt.id} names the shape {named}, which is none of model.resolution")
    if len(shapes) == 1:
        return shapes[0]
    address = Address(run_seed=run_seed, purpose="sample-shape", prompt_id=prompt.id)
    return shapes[int(uniform(address, (1,))[0] * len(shapes))]


def json_object(line: str, place: str) -> dict[str, Any]:
    """The object in one line. Raises UserError, which begins with `place`, if it is none."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise UserError(f"{place} is not a JSON object.")
    return entry


def checked_text(value: Any, place: str) -> str:
    """`value`, if it is text. Raises a UserError that begins with `place` if not."""
    if not isinstance(value, str):
        raise UserError(f"{place} holds {value!r:.80}; it must hold a prompt as text.")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise UserError(f"{place} has half of a surrogate pair, which is no character; write the whole pair.")
    return value


def _of_json(line: str, number: int, place: str, folder: Path, shapes: Collection[SampleShape]) -> _Line:
    entry = json_object(line, place)
    text = entry.get("text")
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{place} has no prompt; it needs a key 'text' with the prompt as a string.")
    paths = references.paths(entry["reference"], folder, place) if entry.get("reference") is not None else []
    shape = _named_shape(entry.get("resolution"), place, shapes)
    return _Line(number, checked_text(text, place).strip(), shape, tuple(paths))


def _named_shape(value: Any, place: str, shapes: Collection[SampleShape]) -> SampleShape | None:
    if value is None:
        return None
    try:
        shape = as_shape(value)
    except ValueError as error:
        raise UserError(f"{place} has the 'resolution' {value!r:.80}; {error}.") from None
    if shapes and not any(shape.is_size_of(each) for each in shapes):
        known = ", ".join(f"[{each.height}, {each.width}]" for each in shapes)
        raise UserError(f"{place} has the 'resolution' {value!r}; it must be one of model.resolution: {known}.")
    return shape
