"""The names of this package's rewards."""

from __future__ import annotations

from solrl_ray.config import named
from solrl_ray.config.problems import nearest
from solrl_ray.errors import UserError

REGISTERED = {
    "aesthetic": "aesthetic:Aesthetic",
    "clipscore": "clip:CLIPScore",
    "hpsv2": "hpsv2:HPSv2",
    "hpsv2_v20": "hpsv2:HPSv20",
    "imagereward": "imagereward:ImageReward",
    "judge": "judge:Judge",
    "ocr": "ocr:Ocr",
    "pickscore": "clip:PickScore",
    "remote": "remote:RemoteReward",
}
"""Name in a configuration → module and class, imported when used."""
EXTRAS = {"ocr": "ocr"}
"""The package's extra with a reward's library, if it is not ``rewards``."""

GPU_BYTES = {
    "aesthetic": 1_220_000_000,
    "clipscore": 1_710_000_000,
    "hpsv2": 3_940_000_000,
    "hpsv2_v20": 3_940_000_000,
    "imagereward": 1_790_000_000,
    "pickscore": 3_940_000_000,
}
"""Bytes of a reward's published checkpoint as loaded, in float32. Others count as 0: ``ocr`` computes on the CPU,
``remote`` and ``judge`` elsewhere, and a user's function is unknown.
"""


def check_kind(kind: str, key: str) -> None:
    """Raise `UserError` naming `key` unless `kind` is registered."""
    if kind not in REGISTERED:
        part, near = named.folder() / "rewards" / f"{kind}.yaml", nearest(kind, REGISTERED)
        meant = f"; did you mean {near}?" if near else "."
        if part.is_file():
            meant = f"; it is the name of a part, whose entry is in {part}."
        raise UserError(
            f"{key} is {kind!r}, which is neither a registered reward ({', '.join(sorted(REGISTERED))}) "
            f"nor of the form 'module:function'{meant}"
        )
