"""Reference pictures of prompts: known by the bytes of their files, checked, and brought to one size."""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import warnings
from collections.abc import Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from solrl_ray.common.files import READ_SECONDS, read_regular, stand_in
from solrl_ray.config.fleet import Deadlines
from solrl_ray.errors import RunError, UserError
from solrl_ray.records import Prompt, Reference

FORMATS = ("PNG", "JPEG", "WEBP")
KINDS = "a PNG, JPEG or WebP file"
MOST_PIXELS = 50_000_000
MOST_BYTES = 100 * 2**20
MODES = ("RGB", "RGBA", "L", "LA", "P", "1")
"""Of Pillow: grey, palette and colour with eight bits a channel."""
PNG_DEPTH = 24
"""Position in a PNG file of the bits a channel, which Pillow does not tell."""


def read(path: str, place: str) -> bytes:
    """The bytes of a picture's file. Raises a UserError that begins with `place` if it is missing or too large."""
    file = Path(path)
    if "://" in path:
        raise UserError(f"{place} names the reference picture {path!r}; it must be a file: download it first.")
    try:
        return read_regular(file, MOST_BYTES)
    except OSError as error:
        raise UserError(
            f"{place} names the reference picture {path!r}, which cannot be read: {error.strerror}."
        ) from error


def opened(content: bytes, path: str, place: str) -> Image.Image:
    """A picture's file as RGB with eight bits a channel, turned as its camera says.

    Raises a UserError that begins with `place` for what is damaged, of another format, animated, larger than
    `MOST_PIXELS`, transparent, of 16 bits or not of RGB or grey.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit is ours, below
            file = Image.open(io.BytesIO(content), formats=FORMATS)
        if wrong := _unfit(file, content):
            raise UserError(_refused(place, path, *wrong))
        file.load()
        picture = file.convert("RGBA") if file.has_transparency_data else file
        if picture is not file and picture.getchannel("A").getextrema() != (255, 255):
            raise UserError(_refused(place, path, "is transparent", "opaque: put it on a background"))
        return ImageOps.exif_transpose(picture).convert("RGB")
    except UserError:
        raise
    except Image.DecompressionBombError as error:
        raise UserError(_refused(place, path, "is huge", f"at most {MOST_PIXELS:,} pixels")) from error
    except UnidentifiedImageError as error:
        found = stand_in(content).partition(";")[0] or "is no picture of a known format"
        raise UserError(_refused(place, path, found, KINDS)) from error
    except Exception as error:  # Pillow's decoders raise many kinds
        raise UserError(_refused(place, path, f"cannot be decoded ({error})", f"{KINDS}, whole")) from error


def prepared(content: bytes, path: str, height: int, width: int) -> NDArray[np.uint8]:
    """A picture [3, height, width]: scaled (Lanczos) until it covers this size, and cut around its middle.

    Raises as `opened`.
    """
    picture = opened(content, path, "a prompt")
    if picture.size != (width, height):
        picture = ImageOps.fit(picture, (width, height), Image.Resampling.LANCZOS)
    return np.ascontiguousarray(np.asarray(picture).transpose(2, 0, 1))


def contents(prompt: Prompt) -> tuple[bytes, ...]:
    """The bytes of a prompt's pictures. Raises UserError if a file is gone or has other bytes than when it was read."""
    found = []
    for reference in prompt.references:
        content = read(reference.path, f"the prompt {prompt.text!r:.60}")
        if hashlib.sha256(content).hexdigest() != reference.digest:
            raise UserError(
                f"The reference picture {reference.path} of the prompt {prompt.text!r:.60} has changed since the run "
                "began; put it back, or begin another run."
            )
        found.append(content)
    return tuple(found)


def pictures(prompt: Prompt, height: int, width: int, given: Sequence[bytes] | None = None) -> NDArray[np.uint8]:
    """A prompt's pictures, [n, 3, height, width]; `given`: their `contents`, else they are read."""
    given = contents(prompt) if given is None else given
    whole = np.empty((len(given), 3, height, width), np.uint8)
    for row, content, reference in zip(whole, given, prompt.references, strict=True):
        row[:] = prepared(content, reference.path, height, width)
    return whole


def known(named: Sequence[tuple[str, str]], *, decode: bool, deadlines: Deadlines | None = None) -> list[Reference]:
    """References of files, each given as path and place in a prompt file. Raises as `read` and `opened`, for the first;
    RunError if a disk hangs.

    Args:
        decode: whether to look at all pixels, as `opened` does.
        deadlines: those of the run. `encode` may pass from one picture to the next, so that any number may be read.
    """
    seconds, key = (deadlines.encode, " (fleet.deadlines.encode)") if deadlines else (READ_SECONDS, "")

    def one(each: tuple[str, str]) -> Reference:
        path, place = each
        content = read(path, place)
        if decode:
            opened(content, path, place)
        return Reference(path=path, digest=hashlib.sha256(content).hexdigest())

    first: dict[str, str] = {}  # several prompts may have the same picture
    for path, place in named:
        first.setdefault(path, place)
    found = dict[str, Reference]()
    # Hashing and decoding release Python's lock. An executor's threads would be waited for if they hang.
    with ThreadPool() as threads:
        results = threads.imap(one, first.items())
        for path, place in first.items():
            try:
                found[path] = results.next(timeout=seconds)
            except multiprocessing.TimeoutError:
                raise RunError(
                    f"{place} names the reference picture {path!r}, whose reading passed its deadline of {seconds:g} s"
                    f"{key}: the disk does not answer"
                ) from None
    return [found[path] for path, _ in named]


def paths(value: Any, folder: Path, place: str) -> list[str]:
    """What a prompt's key ``reference`` says: a path or a list of them, which count from `folder`.

    Raises a UserError that begins with `place` for another value.
    """
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list) or not entries or not all(isinstance(each, str) and each for each in entries):
        raise UserError(
            f"{place} has the key 'reference' with {value!r:.80}; it must be the path of a picture, or a list of paths."
        )
    return [each if "://" in each else str(folder / each) for each in entries]


def _unfit(picture: Image.Image, content: bytes) -> tuple[str, str] | None:
    """What is wrong with a picture that is not decoded yet, and what would be right."""
    width, height = picture.size
    if width * height > MOST_PIXELS:
        return f"has {width} x {height} pixels", f"at most {MOST_PIXELS:,} in all"
    # MPO is JPEG with further pictures, such as a phone's depth map: the first one is the picture.
    if picture.format != "MPO" and getattr(picture, "n_frames", 1) > 1:
        return f"is animated, with {picture.n_frames} frames", "one picture"  # type: ignore[attr-defined]
    if picture.format == "PNG" and content[PNG_DEPTH] == 16:
        return "has 16 bits a channel", "8"
    if picture.mode not in MODES:
        return f"has the colours {picture.mode}", "RGB or grey with 8 bits a channel"
    return None


def _refused(place: str, path: str, wrong: str, right: str) -> str:
    return f"{place} names the reference picture {path!r}, which {wrong}; right would be: {right}."
