"""Pictures of a run: on the disk, in a sheet, and in the page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from solrl_ray.errors import UserError
from solrl_ray.report.grids import contact_sheet, picture_paths, save_pictures
from solrl_ray.report.pictures import Gallery, data_uri


def test_pictures_survive_the_disk_to_half_a_grey_level(tmp_path: Path) -> None:
    image = torch.linspace(-0.1, 1.1, 3 * 4 * 5).reshape(3, 4, 5)
    save_pictures(tmp_path, {("9f", 2): image, ("9f", 10): image})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["9f-10.png", "9f-2.png"]
    back = picture_paths(tmp_path)
    assert list(back) == [("9f", 2), ("9f", 10)]
    with Image.open(back["9f", 2]) as file:
        pixels = torch.from_numpy(np.array(file)).permute(2, 0, 1) / 255
    assert float((pixels - image.clamp(0, 1)).abs().max()) <= 0.5 / 255 + 1e-6


def test_a_picture_with_a_strange_name_is_named(tmp_path: Path) -> None:
    (tmp_path / "holiday.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"holiday\.png is not named"):
        picture_paths(tmp_path)


def test_a_contact_sheet_enlarges_pixels_without_smoothing() -> None:
    dark, mixed = torch.zeros(3, 1, 2), torch.tensor([0.0, 0.6]).expand(3, 1, 2)
    sheet = contact_sheet([[dark, mixed], [mixed]])
    assert sheet.size == (2 + 2 * (96 + 2), 2 + 2 * (48 + 2))  # a pixel is a square of 48
    pixels = np.array(sheet)
    assert (pixels == pixels[:, :, :1]).all()
    expected = np.full((102, 198), 255, dtype=np.uint8)
    for top, left in ((2, 2), (2, 100), (52, 2)):
        expected[top : top + 48, left : left + 96] = 0
    for top, left in ((2, 100), (52, 2)):
        expected[top : top + 48, left + 48 : left + 96] = 153
    assert (pixels[:, :, 0] == expected).all()


def test_a_contact_sheet_averages_areas_of_large_pictures() -> None:
    stripes = torch.tensor([0.0, 0.4] * 256).expand(3, 512, 512)
    sheet = np.array(contact_sheet([[stripes]]))
    assert sheet.shape == (260, 260, 3)
    assert (sheet[2:258, 2:258] == 51).all()


def test_a_contact_sheet_shows_pictures_of_different_shapes_at_one_scale() -> None:
    wide, tall = torch.zeros(3, 256, 512), torch.zeros(3, 512, 128)
    sheet = np.array(contact_sheet([[wide, tall], [tall]]))[:, :, 0]
    assert sheet.shape == (2 + 2 * (256 + 2), 2 + 2 * (256 + 2))  # of 512 pixels 256 are left
    expected = np.full(sheet.shape, 255, dtype=np.uint8)
    expected[2 : 2 + 128, 2 : 2 + 256] = 0
    expected[2 : 2 + 256, 260 : 260 + 64] = 0
    expected[260 : 260 + 256, 2 : 2 + 64] = 0
    assert (sheet == expected).all()


def test_large_pictures_are_embedded_reduced(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (640, 960, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "large.png")
    assert data_uri(tmp_path / "large.png").startswith("data:image/jpeg;base64,")
    assert len(data_uri(tmp_path / "large.png")) < 200_000


def test_a_video_is_a_clip_that_plays_and_a_strip_of_its_frames(tmp_path: Path) -> None:
    grey = torch.linspace(0, 1, 9)[None, :, None, None].expand(3, 9, 8, 6)
    save_pictures(tmp_path, {("9f", 0): grey}, fps=8)
    ((key, path),) = picture_paths(tmp_path).items()
    assert key == ("9f", 0)
    with Image.open(path) as strip:
        assert strip.size == (5 * 6, 8)
        assert [strip.getpixel((x, 0))[0] for x in (0, 6, 12, 18, 24)] == [0, 64, 128, 191, 255]
    with Image.open(path.with_suffix(".webp")) as clip:
        assert (len(list(ImageSequence.Iterator(clip))), clip.size, clip.info["loop"]) == (9, (6, 8), 0)
        clip.seek(1)
        clip.load()
        assert clip.info["duration"] == 125
    (card,) = Gallery.of({"9f": "a text"}, {"base": {key: path}}, {"base": {"9f": [0.5]}}).cards
    (shown,) = card.rows["base"]
    assert shown is not None
    assert shown.uri.startswith("data:image/webp;base64,")
    assert shown.strip == data_uri(path)


def test_a_long_large_video_becomes_a_small_clip_of_the_same_length(tmp_path: Path) -> None:
    save_pictures(tmp_path, {("9f", 0): torch.rand(3, 67, 40, 512)}, fps=16)
    with Image.open(tmp_path / "9f-0.webp") as clip:
        assert (len(list(ImageSequence.Iterator(clip))), clip.size) == (23, (256, 20))  # every third
        clip.seek(1)
        clip.load()
        assert clip.info["duration"] == round(3000 / 16)


def test_a_video_of_eight_bits_has_the_files_of_the_same_floats(tmp_path: Path) -> None:
    levels = torch.randint(0, 256, (3, 9, 8, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    save_pictures(tmp_path / "bytes", {("9f", 0): levels})
    save_pictures(tmp_path / "floats", {("9f", 0): levels / 255})
    for name in ("9f-0.png", "9f-0.webp"):
        assert (tmp_path / "bytes" / name).read_bytes() == (tmp_path / "floats" / name).read_bytes()


def test_a_contact_sheet_shows_each_frame_of_a_strip_as_large_as_a_picture() -> None:
    video, picture = torch.zeros(3, 9, 240, 416), torch.zeros(3, 240, 416)
    gap, height = 2, 240 * 256 // 416
    assert contact_sheet([[picture]]).size == (256 + 2 * gap, height + 2 * gap)
    assert contact_sheet([[video]]).size == (5 * 256 + 2 * gap, height + 2 * gap)
