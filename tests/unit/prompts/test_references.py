"""Reference pictures: which are taken, and what is said of others."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from solrl_ray.common.files import read_regular
from solrl_ray.config.fleet import Deadlines
from solrl_ray.errors import RunError, UserError
from solrl_ray.prompts import references
from solrl_ray.prompts.prompt_set import prompt_id, read_prompts
from tests.support.editing import picture, write_prompts
from tests.support.patience import patience
from tests.support.sentences import names


def saved(image: Image.Image, file: Path, **how: object) -> None:
    image.save(file, **how)  # type: ignore[arg-type]


def deep_png(file: Path) -> None:
    """A PNG file of RGB with 16 bits a channel, which Pillow cannot write."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = zlib.compress((b"\0" + bytes(range(4 * 6))) * 4)
    header = struct.pack(">IIBBBBB", 4, 4, 16, 2, 0, 0, 0)
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b""))


def cut(file: Path) -> None:
    saved(picture(0, 64), file)
    file.write_bytes(file.read_bytes()[:-900])


def see_through(file: Path) -> None:
    colours = np.full((8, 8, 4), 200, np.uint8)
    colours[:, :, 3] = 255
    colours[2, 2, 3] = 254
    saved(Image.fromarray(colours), file)


def clear_colour_of_a_palette(file: Path) -> None:
    saved(picture(0, 8).quantize(4), file, transparency=0)


def bits_16_of_grey(file: Path) -> None:
    saved(Image.fromarray(np.full((8, 8), 40_000, np.uint16)), file)


def frames(file: Path) -> None:
    saved(picture(0, 8), file, save_all=True, append_images=[picture(1, 8)])


def huge(file: Path) -> None:
    saved(Image.new("L", (12_000, 6_000)), file)


BAD: dict[str, Callable[[Path], object]] = {
    "missing.png": lambda file: None,
    "folder.png": lambda file: file.mkdir(),
    "empty.png": lambda file: file.write_bytes(b""),
    "text.png": lambda file: file.write_text("no picture"),
    "cut.png": cut,
    "cut.jpg": cut,
    "transparent.png": see_through,
    "palette.png": clear_colour_of_a_palette,
    "deep.png": deep_png,
    "grey.png": bits_16_of_grey,
    "animated.png": frames,
    "animated.webp": frames,
    "huge.png": huge,
    "print.jpg": lambda file: saved(Image.new("CMYK", (8, 8)), file),
    "other.bmp": lambda file: saved(picture(0, 8), file),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_a_reference_is_refused_with_its_file_and_line(name: str, tmp_path: Path) -> None:
    BAD[name](tmp_path / name)
    good = write_prompts(tmp_path / "p.jsonl", ["a"], 8).read_text()
    (tmp_path / "p.jsonl").write_text(good + "\n" + json.dumps({"text": "b", "reference": name}))
    with pytest.raises(UserError) as refused:
        read_prompts(str(tmp_path / "p.jsonl"), "prompts.train", seen=1)
    said = str(refused.value)
    assert said.startswith(f"prompts.train: {tmp_path}/p.jsonl, line 2 ")
    assert str(tmp_path / name) in said
    assert "\n" not in said
    assert " object at " not in said  # of Python, such as of an open file


@pytest.mark.parametrize("value", [3, "", [], ["a.png", 3], {"path": "a.png"}, "https://example.org/a.png"])
def test_what_is_no_path_is_refused(value: object, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"text": "b", "reference": value}))
    with pytest.raises(UserError, match=r"^prompts: .*, line 1 .*reference"):
        read_prompts(str(tmp_path / "p.jsonl"))


def test_every_prompt_has_as_many_as_the_model_takes(tmp_path: Path) -> None:
    file = write_prompts(tmp_path / "p.jsonl", ["a", "b"], 8)
    file.write_text(file.read_text() + '\n{"text": "c"}')
    with pytest.raises(UserError, match=r"^prompts: .*, line 3 .*model\.references is 1"):
        read_prompts(str(file), seen=1)
    with pytest.raises(UserError, match=r"^prompts: .*, line 1 has 1 reference image, but model\.references is 0"):
        read_prompts(str(file), seen=0)
    (tmp_path / "p.txt").write_text("a")
    with pytest.raises(UserError, match=r"p\.txt, line 1 .*model\.references is 1"):
        read_prompts(str(tmp_path / "p.txt"), seen=1)


def test_a_prompt_is_its_text_and_the_bytes_of_its_pictures(tmp_path: Path) -> None:
    file = write_prompts(tmp_path / "p.jsonl", ["a", "a"], 8)
    first, second = read_prompts(str(file))
    assert first.id != second.id != prompt_id("a")
    path = tmp_path / "p-0-0.png"
    assert [each.path for each in first.references] == [str(path)]
    assert first.references[0].digest == hashlib.sha256(path.read_bytes()).hexdigest()
    (tmp_path / "copy.png").write_bytes(path.read_bytes())
    file.write_text(file.read_text() + '\n{"text": "a", "reference": ["copy.png"]}')
    assert [each.id for each in read_prompts(str(file))] == [first.id, second.id]


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1"])
def test_opaque_pictures_of_every_kind_are_taken(mode: str, tmp_path: Path) -> None:
    original = picture(0, 8).convert(mode)
    saved(original, tmp_path / "p.png")
    content = references.read(str(tmp_path / "p.png"), "here")
    made = references.prepared(content, "p.png", 8, 8)
    assert np.array_equal(made.transpose(1, 2, 0), np.asarray(original.convert("RGB")))


def test_of_a_phones_file_with_several_pictures_the_first_is_taken(tmp_path: Path) -> None:
    original = picture(0, 8)
    saved(original, tmp_path / "p.jpg", format="MPO", save_all=True, append_images=[picture(1, 8)], quality=100)
    made = references.prepared((tmp_path / "p.jpg").read_bytes(), "p.jpg", 8, 8)
    with Image.open(tmp_path / "p.jpg") as file:
        assert file.format == "MPO"
        assert np.array_equal(made.transpose(1, 2, 0), np.asarray(file.convert("RGB")))


def test_a_picture_of_many_prompts_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture(0, 8).save(tmp_path / "p.png")
    lines = [json.dumps({"text": text, "reference": "p.png"}) for text in "abc"]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    opened, real = list[str](), references.opened

    def noted(content: bytes, path: str, place: str) -> Image.Image:
        opened.append(path)
        return real(content, path, place)

    monkeypatch.setattr(references, "opened", noted)
    found = read_prompts(str(tmp_path / "p.jsonl"), seen=1)
    assert len({prompt.id for prompt in found}) == 3
    assert opened == [str(tmp_path / "p.png")]


def test_a_picture_is_cut_to_the_shape_of_samples_around_its_middle(tmp_path: Path) -> None:
    """Black, white and black stripes, three times as wide as high: the white one stays."""
    colours = np.zeros((32, 96, 3), np.uint8)
    colours[:, 32:64] = 255
    saved(Image.fromarray(colours), tmp_path / "p.png")
    made = references.prepared((tmp_path / "p.png").read_bytes(), "p.png", 32, 32)
    assert made.shape == (3, 32, 32)
    assert made.min() == 255


def test_a_picture_of_the_samples_height_and_width_is_taken_as_it_is(tmp_path: Path) -> None:
    original = picture(0, 16, 48)
    saved(original, tmp_path / "p.png")
    made = references.prepared((tmp_path / "p.png").read_bytes(), "p.png", 16, 48)
    assert made.shape == (3, 16, 48)
    assert np.array_equal(made.transpose(1, 2, 0), np.asarray(original))


def test_a_wide_picture_for_high_samples_keeps_its_height_and_loses_its_sides(tmp_path: Path) -> None:
    """64 high and 160 wide, in stripes of 32, for 32 high and 16 wide: half as large, the middle stripe remains."""
    colours = np.zeros((64, 160, 3), np.uint8)
    for stripe in range(5):
        colours[:, 32 * stripe : 32 * (stripe + 1)] = 50 * stripe
    colours[:32, :, 0] = 250  # the upper half is red
    saved(Image.fromarray(colours), tmp_path / "p.png")
    made = references.prepared((tmp_path / "p.png").read_bytes(), "p.png", 32, 16)
    assert made.shape == (3, 32, 16)
    assert (made[1, :, 2:-2] == 100).all()  # the neighbours of its edges have a little of the next stripe
    assert (made[0, :13] == 250).all()
    assert (made[0, 19:, 2:-2] == 100).all()


def test_a_prompts_pictures_are_in_the_order_of_its_line(tmp_path: Path) -> None:
    (prompt,) = read_prompts(str(write_prompts(tmp_path / "p.jsonl", ["a"], 8, 24, count=2)))
    made = references.pictures(prompt, 8, 24)
    files = [np.asarray(Image.open(tmp_path / f"p-0-{n}.png")).transpose(2, 0, 1) for n in range(2)]
    assert np.array_equal(made, np.stack(files))
    other = picture(9, 8, 24)
    saved(other, tmp_path / "p-0-0.png")  # the contents that are given count, not the files
    given = references.pictures(prompt, 8, 24, [file.read_bytes() for file in (tmp_path / "p-0-1.png",) * 2])
    assert np.array_equal(given, np.stack([files[1]] * 2))


def test_a_picture_is_turned_as_its_camera_says(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 3  # orientation: upside down
    original = picture(0, 8)
    saved(original, tmp_path / "p.png", exif=exif)
    made = references.prepared((tmp_path / "p.png").read_bytes(), "p.png", 8, 8)
    assert np.array_equal(made.transpose(1, 2, 0), np.asarray(original)[::-1, ::-1])


def test_a_picture_that_changes_while_a_run_goes_on_is_noticed(tmp_path: Path) -> None:
    (prompt,) = read_prompts(str(write_prompts(tmp_path / "p.jsonl", ["a"], 8)))
    assert references.pictures(prompt, 8, 8).shape == (1, 3, 8, 8)
    saved(picture(5, 8), Path(prompt.references[0].path))
    with pytest.raises(UserError, match=r"p-0-0\.png .* has changed"):
        references.contents(prompt)


def slow_pictures(folder: Path, monkeypatch: pytest.MonkeyPatch, count: int, seconds: float) -> Path:
    """A prompt file whose pictures' disk takes so long for each, one after the other."""
    began = time.monotonic()

    def slowly(file: Path, most: float) -> bytes:
        number = int(file.stem.split("-")[1])
        time.sleep(max(0.0, began + (number + 1) * seconds - time.monotonic()))
        return read_regular(file, most)

    monkeypatch.setattr(references, "read_regular", slowly)
    return write_prompts(folder / "p.jsonl", [str(number) for number in range(count)], 8)


def test_many_pictures_may_take_longer_than_the_deadline_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = patience(1.0)
    file = slow_pictures(tmp_path, monkeypatch, 4, seconds / 2)
    began = time.monotonic()
    found = read_prompts(str(file), seen=1, deadlines=Deadlines(encode=seconds))
    assert time.monotonic() - began > seconds
    contents = [Path(each.references[0].path).read_bytes() for each in found]
    assert [each.references[0].digest for each in found] == [hashlib.sha256(each).hexdigest() for each in contents]


def test_a_picture_whose_disk_hangs_is_named_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = slow_pictures(tmp_path, monkeypatch, 1, 3.0)
    with pytest.raises(RunError) as caught:
        read_prompts(str(file), "prompts.train", seen=1, deadlines=Deadlines(encode=0.2))
    said = str(caught.value)
    assert said.startswith(f"prompts.train: {file}, line 1 ")
    assert f"'{tmp_path}/p-0-0.png'" in said
    assert "0.2 s (fleet.deadlines.encode)" in said


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"


def linked(file: Path, target: str) -> None:
    file.symlink_to(target)


def sparse(file: Path) -> None:
    file.touch()
    os.truncate(file, 2**40)


@pytest.mark.parametrize(
    ("name", "make", "why"),
    [
        ("zero.png", partial(linked, target="/dev/zero"), "a pipe or a device"),
        ("endless.png", partial(linked, target="/proc/self/pagemap"), "no known image format"),
        ("pipe.png", os.mkfifo, "a pipe or a device"),
        ("folder.png", Path.mkdir, "a directory"),
        ("zero\0byte.png", lambda file: None, "no file has such a name"),
        ("large.png", sparse, "1,099,511,627,776"),
        ("lfs.png", lambda file: file.write_text(LFS), "a Git LFS pointer"),
        ("page.png", lambda file: file.write_text("<!DOCTYPE html><title>Log in</title>"), "an HTML page"),
    ],
)
def test_only_a_regular_file_of_a_picture_is_read(
    name: str, make: Callable[[Path], object], why: str, tmp_path: Path
) -> None:
    make(tmp_path / name)
    (tmp_path / "p.jsonl").write_text(json.dumps({"text": "a", "reference": name}))
    with pytest.raises(UserError) as caught:
        read_prompts(str(tmp_path / "p.jsonl"), "prompts.train", seen=1)
    assert names(str(caught.value), "prompts.train", "line 1")
    assert why in str(caught.value)
