"""Before and after: pictures on fixed prompts and seeds, one card per prompt, one column per seed."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from solrl_ray.errors import UserError
from solrl_ray.metrics.records import EvaluationMetrics
from solrl_ray.report.data import RunData
from solrl_ray.report.grids import PictureKey
from solrl_ray.report.markup import digits, escape
from solrl_ray.report.summary import find_evaluation

POLICIES = {"base": "base", "final": "ema", "real": "real"}
"""Row of the grid → policy of the evaluation it shows."""
LARGEST = 320
"""Longest side of an embedded picture, pixels; larger ones are reduced."""
LOSSLESS = 128
"""Pictures up to this side are embedded as PNG, larger ones as JPEG."""


def picture_layout(data: RunData) -> dict[str, str]:
    """Values of the template that depend on the pictures: columns, sizes, and hard pixels for small ones."""
    everything = [path for pictures in data.pictures.values() for path in pictures.values()]
    columns = max((len(_samples(data, prompt_id)) for prompt_id in _prompt_ids(data)), default=1)
    side = 0
    if everything:
        with _opened(everything[0]) as file:
            side = max(file.size)
    small = side <= LOSSLESS
    width = 96 if small else 240
    return {
        "columns": str(columns),
        "prompt_width": f"{42 + columns * (width + 8) + 34}px",
        "rendering": "image-rendering: pixelated;" if small else "",
    }


def picture_grid(data: RunData) -> str:
    """The section of pictures; empty if the run kept none."""
    prompt_ids = _prompt_ids(data)
    if not prompt_ids:
        return ""
    records = {name: find_evaluation(data.evaluations, policy) for name, policy in POLICIES.items()}
    cards = "".join(_prompt_card(data, records, prompt_id) for prompt_id in prompt_ids)
    note = "Held-out prompts. A column is one seed: the same noise before and after training."
    final = records["final"]
    if final is not None:
        note += f" The final row is the policy after {final.iteration} updates."
    note += " Numbers are rewards; real pictures show what the caption means and share no noise with the others."
    return f'<h2>Before and after</h2><p class="note">{escape(note)}</p><div class="prompts">{cards}</div>'


def _prompt_ids(data: RunData) -> list[str]:
    """Prompts with pictures, in the order in which they were evaluated."""
    with_pictures = {prompt_id for pictures in data.pictures.values() for prompt_id, _ in pictures}
    order = [prompt_id for record in data.evaluations for prompt_id in record.rewards]
    return sorted(with_pictures, key=lambda prompt_id: order.index(prompt_id) if prompt_id in order else len(order))


def _samples(data: RunData, prompt_id: str) -> list[int]:
    keys = {key for pictures in data.pictures.values() for key in pictures}
    return sorted(sample for owner, sample in keys if owner == prompt_id)


def _prompt_card(data: RunData, records: Mapping[str, EvaluationMetrics | None], prompt_id: str) -> str:
    captions = {key: text for record in data.evaluations for key, text in record.captions.items()}
    samples = _samples(data, prompt_id)
    rows = "".join(
        _row(name, data.pictures[name], records[name], prompt_id, samples)
        for name in POLICIES
        if any(owner == prompt_id for owner, _ in data.pictures[name])
    )
    means = []
    for name, record in records.items():
        rewards = record.rewards.get(prompt_id, ()) if record is not None else ()
        if rewards:
            means.append(f"{name} {digits(math.fsum(rewards) / len(rewards))}")
    caption = f'<p class="caption">{escape(captions.get(prompt_id, prompt_id))}</p>'
    change = f'<p class="change">mean reward: {escape(" · ".join(means))}</p>'
    return f'<div class="card">{caption}{change}<div class="pictures">{rows}</div></div>'


def _row(
    name: str,
    pictures: Mapping[PictureKey, Path],
    record: EvaluationMetrics | None,
    prompt_id: str,
    samples: Sequence[int],
) -> str:
    cells = [f'<div class="row">{name}</div>']
    rewards = record.rewards.get(prompt_id, ()) if record is not None else ()
    for sample in samples:
        path = pictures.get((prompt_id, sample))
        if path is None:
            cells.append("<div></div>")
            continue
        reward = digits(rewards[sample]) if sample < len(rewards) else "–"
        image = f'<img src="{data_uri(path)}" alt="{name}, sample {sample}, reward {reward}">'
        cells.append(f"<figure>{image}<figcaption>{reward}</figcaption></figure>")
    return "".join(cells)


def data_uri(path: Path) -> str:
    """A picture as ``data:`` URI: small PNG files as they are, larger pictures reduced and as JPEG.

    Raises:
        UserError: it cannot be read.
    """
    with _opened(path) as file:
        if max(file.size) <= LOSSLESS and file.format == "PNG":
            return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
        picture = file.convert("RGB")
    picture.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=88)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    try:
        with Image.open(path) as file:
            yield file
    except OSError as error:  # what Pillow raises for files that are no pictures, or cut off, is one, too
        raise UserError(f"The picture {path} cannot be read: {error}.") from error
