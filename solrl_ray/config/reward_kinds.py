"""The names of the rewards that this package has."""

from __future__ import annotations

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
"""Rewards by the name they have in a configuration: module and class, imported when they are used."""
EXTRAS = {"ocr": "ocr"}
"""The package's extra that has a reward's library, if it is not ``rewards``."""

GPU_BYTES = {
    "aesthetic": 1_220_000_000,
    "clipscore": 1_710_000_000,
    "hpsv2": 3_940_000_000,
    "hpsv2_v20": 3_940_000_000,
    "imagereward": 1_790_000_000,
    "pickscore": 3_940_000_000,
}
"""What the published checkpoint of a reward takes in float32, as it is loaded. Others take nothing, as far as is known
here: ``ocr`` computes on the CPU, ``remote`` and ``judge`` elsewhere, and a function of one's own nobody knows."""


def check_kind(kind: str, key: str) -> None:
    """Raise `UserError` naming `key` unless `kind` is registered."""
    if kind not in REGISTERED:
        raise UserError(
            f"{key} is {kind!r}, which is neither a registered reward ({', '.join(sorted(REGISTERED))}) "
            "nor of the form 'module:function'."
        )
