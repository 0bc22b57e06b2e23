"""The registered rewards: class, keys, memory and time of each kind, and checks of its entries. Imports no reward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from solrl_ray.config import named
from solrl_ray.config.problems import listed, nearest
from solrl_ray.config.rewards import RewardConfig
from solrl_ray.errors import UserError

COMMON = {"kind", "weight", "normalize", "reproducible", "frames"}
"""Fields of an entry that every reward reads. Other fields are read only by the kinds that list them in `options`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardKind:
    source: str = ""
    """``module:class`` of the reward, module relative to `solrl_ray.rewards`; imported when used."""
    options: frozenset[str] = frozenset()
    """Fields of an entry that the reward reads besides `COMMON`."""
    required: frozenset[str] = frozenset()
    """Fields of `options` that an entry must set."""
    extra: str = "rewards"
    """Extra of this package that installs the reward's library."""
    reproducible: bool = True
    """Whether an image gets the same score each time. An entry's `reproducible` overrides it."""
    videos: bool = False
    """Whether the reward scores whole videos. If not, it scores images, and selected frames of videos."""
    references: bool = False
    """Whether the reward always needs reference images, whatever its entry says."""
    together: Literal["", "can", "must"] = ""
    """Whether the reward can or must score the selected frames of a video in one call; empty: it cannot."""
    gpu_bytes: int = 0
    """Bytes of the published checkpoint when loaded: in float32, for vision-language models in bfloat16. 0 for rewards
    that compute on the CPU or on a server.
    """
    ms: float = 0.0
    """Estimated milliseconds per image on an H100; 0: a plan counts the reward as CLIPScore."""


_PATH, _BOTH = frozenset({"path"}), frozenset({"path", "base"})
_REMOTE, _JUDGE, _ENOUGH = frozenset({"remote"}), frozenset({"judge"}), frozenset({"enough"})
REGISTERED = {
    "aesthetic": RewardKind(source="aesthetic:Aesthetic", options=_BOTH, required=_BOTH, gpu_bytes=1_220_000_000),
    "clip_edit": RewardKind(
        source="clip:CLIPEdit",
        options=_PATH | {"preprocessing", "reference_weight"},
        required=_PATH,
        references=True,
        gpu_bytes=1_710_000_000,
    ),
    "clipscore": RewardKind(
        source="clip:CLIPScore", options=_PATH | {"preprocessing"}, required=_PATH, gpu_bytes=1_710_000_000
    ),
    "hpsv2": RewardKind(source="hpsv2:HPSv2", options=_PATH, required=_PATH, gpu_bytes=3_940_000_000),
    "hpsv2_v20": RewardKind(source="hpsv2:HPSv20", options=_PATH, required=_PATH, gpu_bytes=3_940_000_000),
    # 960 tokens through 6.5e9 weights, 1,024 patches through 0.67e9 weights: 14 TFLOP, at half of 989 TFLOP/s.
    "hpsv3": RewardKind(source="hpsv3:HPSv3", options=_BOTH, required=_BOTH, gpu_bytes=15_500_000_000, ms=28),
    "imagereward": RewardKind(source="imagereward:ImageReward", options=_BOTH, required=_BOTH, gpu_bytes=1_790_000_000),
    "judge": RewardKind(source="judge:Judge", options=_JUDGE, required=_JUDGE, reproducible=False, together="can"),
    "motion": RewardKind(source="motion:Motion", options=_ENOUGH, required=_ENOUGH, videos=True),
    "ocr": RewardKind(source="ocr:Ocr", extra="ocr"),
    "pickscore": RewardKind(source="clip:PickScore", options=_BOTH, required=_PATH, gpu_bytes=3_940_000_000),
    "remote": RewardKind(source="remote:RemoteReward", options=_REMOTE, required=_REMOTE),
    # Prefill of 7 TFLOP, then 80 decoded tokens at 25 ms for a batch of 24.
    "unifiedreward": RewardKind(
        source="unifiedreward:UnifiedReward", options=_PATH, required=_PATH, gpu_bytes=16_590_000_000, ms=100
    ),
    # 6 frames of 200,704 pixels: 1,600 tokens through 1.5e9 weights and 3,072 patches through 0.67e9 weights: 9 TFLOP.
    "videoreward": RewardKind(
        source="videoreward:VideoReward",
        options=_BOTH,
        required=_BOTH,
        together="must",
        gpu_bytes=4_420_000_000,
        ms=18,
    ),
}
"""Registered rewards by their name in a configuration."""
FUNCTION = RewardKind()
"""The kind of a user's function; its GPU memory is unknown."""


def kind_of(config: RewardConfig) -> RewardKind:
    """The registered kind of an entry; `FUNCTION` for any other kind. `check` rejects unknown kinds."""
    return REGISTERED.get(config.kind, FUNCTION)


def needs_references(config: RewardConfig) -> str:
    """The field that makes a reward need reference images; empty if it needs none."""
    if kind_of(config).references:
        return "kind"
    if config.judge and config.judge.question.references:
        return "judge.question.references"
    return "remote.references" if config.remote and config.remote.references else ""


def check(config: RewardConfig, keys: Callable[[str], str]) -> None:
    """Raise `UserError` for an unknown kind, a field that the kind does not read, or a missing field.

    `keys`: returns the name of a field such as ``path`` in messages.
    """
    if ":" not in config.kind and config.kind not in REGISTERED:
        raise UserError(_unknown(config.kind, keys("kind")))
    kind, fields = kind_of(config), type(config).model_fields
    given = [name for name in fields if name not in COMMON and getattr(config, name) != fields[name].default]
    for option in given:
        if option not in kind.options:
            value = getattr(config, option)
            shown = repr(value) if isinstance(value, str) else "given"
            what = "a function" if kind is FUNCTION else "the reward"
            raise UserError(f"{keys(option)} is {shown}, but {what} ({config.kind}) does not read it; leave it out.")
    if lacking := sorted(kind.required - set(given)):
        what = f"the {'keys' if len(lacking) > 1 else 'key'} {listed(lacking)}"
        raise UserError(f"{keys('kind')} is {config.kind!r}, but its entry lacks {what}; see docs/guides/rewards.md.")


def check_frames(config: RewardConfig, keys: Callable[[str], str], frames: int) -> None:
    """Raise `UserError` if an entry does not fit the run's samples: videos of `frames` frames, or images (0). Functions
    of the user are checked when they are tried.
    """
    kind, chosen = kind_of(config), config.frames
    if not frames:
        if kind.videos:
            raise UserError(f"{keys('kind')} is {config.kind!r}, which scores videos, but model.frames is not given.")
        if chosen or kind.together == "must":
            raise UserError(
                f"{keys('frames') if chosen else keys('kind')} is {'given' if chosen else repr(config.kind)}, but "
                f"model.frames is not: the samples are images; {'leave it out' if chosen else 'use another reward'}."
            )
        return
    if kind.videos and chosen:
        raise UserError(f"{keys('frames')} is given, but {config.kind} scores whole videos; leave it out.")
    if kind.together == "must" and (not chosen or chosen.combine != "together" or chosen.count % 2):
        shown = f"{{count: {chosen.count}, combine: {chosen.combine}}}" if chosen else "missing"
        raise UserError(
            f"{keys('frames')} is {shown}, but {config.kind} scores an even number of frames together; its authors use "
            "two frames per second, so set {count: 6, combine: together} for three seconds."
        )
    if not kind.videos and not chosen and kind is not FUNCTION:
        raise UserError(
            f"{keys('frames')} is missing: {config.kind} scores images, so choose frames of the video, such as "
            "{count: 4} for the mean of four frames or {count: 2, combine: worst} for the worse of the first and the "
            "last frame."
        )
    if chosen and chosen.count > frames:
        raise UserError(
            f"{keys('frames.count')} is {chosen.count}, but model.frames is {frames}; set it to at most {frames}."
        )
    if chosen and chosen.combine == "together" and not kind.together:
        able = listed(sorted(name for name, each in REGISTERED.items() if each.together))
        raise UserError(f"{keys('frames.combine')} is 'together', which only {able} support; use 'mean' or 'worst'.")


def _unknown(kind: str, key: str) -> str:
    part, near = named.folder() / "rewards" / f"{kind}.yaml", nearest(kind, REGISTERED)
    meant = f"; did you mean {near}?" if near else "."
    if part.is_file():
        meant = f"; it is the name of a preset, whose entry is in {part}."
    return (
        f"{key} is {kind!r}, which is neither a registered reward ({', '.join(sorted(REGISTERED))}) "
        f"nor of the form 'module:function'{meant}"
    )
