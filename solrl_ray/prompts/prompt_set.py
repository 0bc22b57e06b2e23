"""Prompt files of a run: reading, prompt ids, choice of the prompts of each iteration, and shapes of samples."""

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
"""Purpose in the addresses of the random numbers that choose the prompts of an iteration."""


def prompt_id(text: str, references: Sequence[Reference] = ()) -> str:
    """Prompt id: 16 hex digits of BLAKE2b-64 over the UTF-8 text and the digests of its reference images.

    A zero byte precedes each digest.
    """
    whole = "\0".join([text, *(reference.digest for reference in references)])
    return hashlib.blake2b(whole.encode(), digest_size=8).hexdigest()


def negative_prompt(model: Model, seen: Sequence[Reference] = ()) -> Prompt | None:
    """The negative prompt of `model.cfg`, with the reference images `seen`; None without classifier-free guidance."""
    text = model.cfg.negative_prompt
    return Prompt(id=prompt_id(text, seen), text=text, references=tuple(seen)) if model.cfg.is_on else None


class _Line(NamedTuple):
    """A line of a prompt file, before its reference images are read."""

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
    """Read a file with one prompt per line or, if its name ends in ``.jsonl``, one object with the key ``text`` per
    line.

    White space around a prompt is removed, empty lines are skipped, and a repeated prompt counts once, at its first
    line. An object may have the key ``resolution`` (the shape of the prompt's samples) and the key ``reference`` (paths
    of images, relative to the folder of the file). Other keys are ignored. `path` may be ``builtin:…``.

    Args:
        key: configuration key to name in errors.
        shapes: shapes that a prompt may request; empty: any.
        seen: number of reference images that each prompt must have; the images are decoded to check them. None: any
            number, without decoding.
        deadlines: deadlines of the run; ``encode`` also limits the check of one image.

    Raises RunError if a disk hangs. Raises `UserError` naming `key` and the file if the file is missing, not UTF-8,
    malformed or without prompts, or if a prompt requests an unknown shape or two different ones, or has an image that
    cannot be used (`references.opened`).
    """
    lines = in_time(lambda: _lines(path, key, shapes), what=f"reading {path}", seconds=READ_SECONDS)
    location = f"{key}: {resolve(path)}, line "
    for line in lines:
        if seen is not None and len(line.paths) != seen:
            raise UserError(_wrong_count(line, location, seen))
    named = [(file, f"{location}{line.number}") for line in lines for file in line.paths]
    known = iter(references.known(named, decode=seen is not None, deadlines=deadlines) if named else ())
    prompts: dict[str, Prompt] = {}
    for line in lines:
        images = tuple(next(known) for _ in line.paths)
        identity = prompt_id(line.text, images)
        if identity not in prompts:
            prompts[identity] = Prompt(id=identity, text=line.text, shape=line.shape, references=images)
    return list(prompts.values())


def _wrong_count(line: _Line, location: str, expected: int) -> str:
    """The error for a prompt that does not have the number of reference images that the model takes."""
    fix = f"give each prompt {expected} under 'reference'" if expected else "leave them out, or use an editing model"
    actual = counted(len(line.paths), "reference image") if line.paths else "no reference image"
    return f"{location}{line.number} has {actual}, but model.references is {expected}; {fix}."


def _lines(path: str, key: str, shapes: Collection[SampleShape]) -> list[_Line]:
    """The distinct prompts of a file, each from its first line."""
    file = Path(resolve(path))
    if (suffix := file.suffix.lower()) in (".csv", ".tsv", ".json", ".parquet"):
        raise UserError(f"{key} is {path!r}; convert it to prompt files with `solrl prompts import {path}`.")
    distinct: dict[Any, _Line] = {}
    try:
        check_regular(file)
        # Read line by line, so that a file of a million prompts is in memory only once. splitlines() would also split
        # at separators that a prompt may contain.
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if number == 1 and (wrong := stand_in(line.encode())):
                    raise UserError(f"{key} is {path!r}, but {file} {wrong}.")
                if not line.strip():
                    continue
                location = f"{key}: {file}, line {number}"
                read = _of_json(line, number, location, file.parent, shapes) if suffix == ".jsonl" else None
                read = read or _Line(number, line.strip())
                identity = (read.text, read.paths) if read.paths else read.text
                if distinct.setdefault(identity, read).shape != read.shape:
                    raise UserError(f"{location} repeats a prompt with another 'resolution'; use the same one.")
    except UnicodeDecodeError:
        utf8_text(file, f"{key} is {path!r}, but {file}")  # names the line
        raise
    except OSError as error:
        raise UserError(
            f"{key} is {path!r}, but {file} cannot be read ({error.strerror})"
            + ("" if file.is_absolute() else f"; the path is relative to the current folder, {Path.cwd()}")
            + "; use a text file with one prompt per line, "
            "or a .jsonl file with one object per line and its prompt under 'text'"
            + (f"; this package ships {', '.join(shipped('*.txt'))}." if path.startswith(BUILTIN) else ".")
        ) from error
    if not distinct:
        raise UserError(f"{key} is {path!r}, but {file} has no prompts.")
    return list(distinct.values())


def two_prompts(
    config: Config, sources: Sources | None = None
) -> tuple[tuple[str, str], tuple[tuple[bytes, ...], ...]]:
    """Two prompts for trying a reward: the first two held-out prompts, or the only one and the first training prompt.

    Returns their texts, and the contents of their reference images if the model takes any.

    Raises `UserError` if a prompt file or an image cannot be read.
    """
    sources, prompts = sources or Sources(), list[Prompt]()
    for name, path in (("heldout", config.prompts.heldout), ("train", config.prompts.train)):
        if len(prompts) < 2:
            prompts += read_prompts(path, f"prompts.{name} ({sources.of(f'prompts.{name}')})")
    first, second = prompts[:2]
    files = (references.contents(first), references.contents(second)) if config.model.references else ()
    return (first.text, second.text), files


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """SHA-256 (hex) over the prompt ids in their order, one per line, with the shapes that the file requests."""
    lines = (f"{prompt.id} {prompt.shape}" if prompt.shape else prompt.id for prompt in prompts)
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


def choose(prompts: Sequence[Prompt], run_seed: int, iteration: int, count: int) -> list[Prompt]:
    """The prompts of an iteration: the first `count` of a permutation that depends on run seed and iteration.

    Raises `ValueError` if there are fewer than `count` prompts.
    """
    if count > len(prompts):
        raise ValueError(f"an iteration takes {count} prompts, but there are {len(prompts)}")
    address = Address(run_seed=run_seed, purpose=CHOICE, iteration=iteration)
    return [prompts[i] for i in permutation(address, len(prompts))[:count]]


def shape_of(prompt: Prompt, shapes: Sequence[SampleShape], run_seed: int) -> SampleShape:
    """The shape of a prompt's samples: the one that its file requests, else one of `shapes` with equal probability.

    The draw depends only on run seed and prompt, so that previews, samples and evaluations of a prompt have the same
    shape in every iteration.

    Raises ValueError if the requested shape is not in `shapes`.
    """
    if (named := prompt.shape) is not None:
        if matching := next((shape for shape in shapes if named.is_size_of(shape)), None):
            return matching
        raise ValueError(f"prompt {prompt.id} requests the shape {named}, which is not in model.resolution")
    if len(shapes) == 1:
        return shapes[0]
    address = Address(run_seed=run_seed, purpose="sample-shape", prompt_id=prompt.id)
    return shapes[int(uniform(address, (1,))[0] * len(shapes))]


def json_object(line: str, place: str) -> dict[str, Any]:
    """Parse a line with a JSON object. Raises a UserError that begins with `place` if it has none."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise UserError(f"{place} is not a JSON object.")
    return entry


def checked_text(value: Any, place: str) -> str:
    """Return `value` if it is valid text. Raises a UserError that begins with `place` if not."""
    if not isinstance(value, str):
        raise UserError(f"{place} has {value!r:.80}; it must be a prompt as text.")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise UserError(f"{place} has half of a surrogate pair, which is not a character; write the whole pair.")
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
    if shapes and not any(shape.is_size_of(allowed) for allowed in shapes):
        known = ", ".join(f"[{allowed.height}, {allowed.width}]" for allowed in shapes)
        raise UserError(f"{place} has the 'resolution' {value!r}; it must be one of model.resolution: {known}.")
    return shape
