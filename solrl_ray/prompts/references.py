"""Reference images of prompts: identified by their file contents, checked, and scaled to the size of the samples."""

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
"""Maximum number of pixels of an image."""
MOST_BYTES = 100 * 2**20
"""Maximum size of an image file, in bytes."""
MODES = ("RGB", "RGBA", "L", "LA", "P", "1")
"""Accepted modes of Pillow: grey, palette and colour with eight bits per channel."""
PNG_DEPTH = 24
"""Offset in a PNG file of the byte with the bits per channel, which Pillow does not report."""


def read(path: str, place: str) -> bytes:
    """Read an image file. Raises a UserError that begins with `place` if it is missing or too large."""
    file = Path(path)
    if "://" in path:
        raise UserError(
            f"{place} has the reference image {path!r}, which is a URL; download it and use the path of the file."
        )
    try:
        return read_regular(file, MOST_BYTES)
    except OSError as error:
        raise UserError(f"{place} has the reference image {path!r}, which cannot be read: {error.strerror}.") from error


def opened(content: bytes, path: str, place: str) -> Image.Image:
    """Decode an image file to RGB with eight bits per channel, rotated according to its EXIF orientation.

    Raises a UserError that begins with `place` if the image is damaged, has another format, is animated, is larger than
    `MOST_PIXELS`, is transparent, has 16 bits per channel, or has colours other than RGB or grey.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit is checked below
            file = Image.open(io.BytesIO(content), formats=FORMATS)
        if wrong := _unfit(file, content):
            raise UserError(_refused(place, path, *wrong))
        file.load()
        picture = file.convert("RGBA") if file.has_transparency_data else file
        if picture is not file and picture.getchannel("A").getextrema() != (255, 255):
            raise UserError(_refused(place, path, "is transparent", "an opaque image: put it on a background"))
        return ImageOps.exif_transpose(picture).convert("RGB")
    except UserError:
        raise
    except Image.DecompressionBombError as error:
        raise UserError(_refused(place, path, "is huge", f"at most {MOST_PIXELS:,} pixels")) from error
    except UnidentifiedImageError as error:
        problem = stand_in(content).partition(";")[0] or "has no known image format"
        raise UserError(_refused(place, path, problem, KINDS)) from error
    except Exception as error:  # Pillow's decoders raise many kinds
        raise UserError(_refused(place, path, f"cannot be decoded ({error})", f"{KINDS} that is complete")) from error


def prepared(content: bytes, path: str, height: int, width: int) -> NDArray[np.uint8]:
    """Decode an image to uint8 [3, height, width]: scaled to cover this size (Lanczos), then cropped around the centre.

    Raises the errors of `opened`.
    """
    picture = opened(content, path, "a prompt")
    if picture.size != (width, height):
        picture = ImageOps.fit(picture, (width, height), Image.Resampling.LANCZOS)
    return np.ascontiguousarray(np.asarray(picture).transpose(2, 0, 1))


def contents(prompt: Prompt) -> tuple[bytes, ...]:
    """Read the image files of a prompt. Raises UserError if a file is missing, or has changed since the run began."""
    files = []
    for reference in prompt.references:
        content = read(reference.path, f"the prompt {prompt.text!r:.60}")
        if hashlib.sha256(content).hexdigest() != reference.digest:
            raise UserError(
                f"The reference image {reference.path} of the prompt {prompt.text!r:.60} has changed since the run "
                "began; restore it, or begin another run."
            )
        files.append(content)
    return tuple(files)


def pictures(prompt: Prompt, height: int, width: int, given: Sequence[bytes] | None = None) -> NDArray[np.uint8]:
    """The images of a prompt, uint8 [n, 3, height, width].

    `given`: the contents of their files; None: read them.
    """
    given = contents(prompt) if given is None else given
    whole = np.empty((len(given), 3, height, width), np.uint8)
    for row, content, reference in zip(whole, given, prompt.references, strict=True):
        row[:] = prepared(content, reference.path, height, width)
    return whole


def known(named: Sequence[tuple[str, str]], *, decode: bool, deadlines: Deadlines | None = None) -> list[Reference]:
    """References to image files with their digests, in the given order; files are read in parallel.

    Args:
        named: (path, location in a prompt file) of each image.
        decode: whether to decode the images to check them, as `opened` does.
        deadlines: deadlines of the run. ``encode`` limits the time per image, so that any number can be read.

    Raises the error of `read` or `opened` for the first file that has one; RunError if a disk hangs.
    """
    seconds, key = (deadlines.encode, " (fleet.deadlines.encode)") if deadlines else (READ_SECONDS, "")

    def reference(image: tuple[str, str]) -> Reference:
        path, place = image
        content = read(path, place)
        if decode:
            opened(content, path, place)
        return Reference(path=path, digest=hashlib.sha256(content).hexdigest())

    first: dict[str, str] = {}  # several prompts may use the same image
    for path, place in named:
        first.setdefault(path, place)
    references = dict[str, Reference]()
    # Threads, because hashing and decoding release the GIL. Not an executor, which would wait for threads that hang.
    with ThreadPool() as threads:
        results = threads.imap(reference, first.items())
        for path, place in first.items():
            try:
                references[path] = results.next(timeout=seconds)
            except multiprocessing.TimeoutError:
                raise RunError(
                    f"{place} has the reference image {path!r}, whose reading passed its deadline of "
                    f"{seconds:g} s{key}: the disk does not answer"
                ) from None
    return [references[path] for path, _ in named]


def paths(value: Any, folder: Path, place: str) -> list[str]:
    """Paths in the key ``reference`` of a prompt, which is a path or a list of paths, relative to `folder`.

    Raises a UserError that begins with `place` for another value.
    """
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, str) and entry for entry in entries):
        raise UserError(
            f"{place} has the key 'reference' with {value!r:.80}; it must be the path of an image, or a list of paths."
        )
    return [entry if "://" in entry else str(folder / entry) for entry in entries]


def _unfit(picture: Image.Image, content: bytes) -> tuple[str, str] | None:
    """The problem with an image that is not decoded yet, and the requirement; None if there is no problem."""
    width, height = picture.size
    if width * height > MOST_PIXELS:
        return f"has {width} x {height} pixels", f"at most {MOST_PIXELS:,} pixels"
    # MPO is JPEG with further images, such as the depth map of a phone; the first image is used.
    if picture.format != "MPO" and getattr(picture, "n_frames", 1) > 1:
        return f"is animated, with {picture.n_frames} frames", "a single image"  # type: ignore[attr-defined]
    if picture.format == "PNG" and content[PNG_DEPTH] == 16:
        return "has 16 bits per channel", "8 bits per channel"
    if picture.mode not in MODES:
        return f"has the colours {picture.mode}", "RGB or grey with 8 bits per channel"
    return None


def _refused(place: str, path: str, problem: str, requirement: str) -> str:
    """The error for an image that cannot be used."""
    return f"{place} has the reference image {path!r}, which {problem}; it must be: {requirement}."
