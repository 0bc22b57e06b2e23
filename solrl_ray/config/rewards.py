"""The entries of the section `rewards`: what is maximised, how it is computed, and from which frames of a video."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import PrivateAttr

from solrl_ray.common.own_code import OwnCode
from solrl_ray.config.section import AboveZero, AtLeastZero, Location, Natural, Positive, Seconds, Section


class Normalization(Section):
    """(reward - mean) / std with fixed numbers, because a score must not depend on earlier scores."""

    mean: float
    """Mean of the reward on images of your base model."""
    std: AboveZero
    """Its standard deviation on them."""


class Remote(Section):
    """A reward server. docs/guides/rewards.md has its protocol."""

    url: str
    """Where batches are posted, such as ``http://rewards.internal:8000/score``."""
    timeout: Seconds = 60.0
    """Limit of one attempt, seconds."""
    retries: Natural = 3
    """Further attempts after a temporary failure."""
    token_variable: str = ""
    """Environment variable with the server's bearer token, on every machine that scores."""
    references: bool = False
    """Whether the server also gets each prompt's reference pictures."""


class Question(Section):
    """What a judge is asked about a picture, and how its answer becomes a score between 0 and 1."""

    text: Location
    """``{prompt}`` stands for the picture's prompt. A question for a number names `low` and `high`."""
    references: bool = False
    """Whether the question shows the prompt's reference pictures before the picture."""
    answer: Literal["number", "yes"] = "number"
    """``number``: the answer's number, between `low` and `high`. ``yes``: the probability of "yes" against "no", from
    the first token's log-probabilities.
    """
    low: float = 0.0
    """The number that scores 0."""
    high: float = 10.0
    """The number that scores 1."""
    pattern: str = ""
    """Regular expression of the place of the number in an answer, where its group begins, if it has one; empty: the
    answer is the number alone, and is asked for as JSON where the endpoint can. All matches must be the same number.
    """
    max_tokens: Positive = 16
    """Limit of an answer; reasoning takes hundreds. An answer that was cut has no score."""


class JudgeConfig(Section):
    """A vision-language model that scores pictures, behind OpenAI's chat interface: vLLM, SGLang or a service."""

    url: str
    """Base URL of the interface, such as ``http://127.0.0.1:8000/v1``."""
    model: Location
    """The model's name at the endpoint."""
    question: Question
    timeout: Seconds = 60.0
    """Limit of one attempt, seconds."""
    retries: Natural = 3
    """Further attempts after a temporary failure, or an answer without a score."""
    concurrency: Positive = 8
    """Pictures that one worker asks about at a time."""
    token_variable: str = ""
    """Environment variable with the endpoint's bearer token, on every machine that scores."""
    request: dict[str, Any] = {}
    """More fields of every request, or other values, such as ``{chat_template_kwargs: {enable_thinking: false}}``; null
    leaves a field out: ``{max_tokens: null, max_completion_tokens: 16}``.
    """


class Frames(Section):
    """Which frames of a video a reward sees, and how their scores become one."""

    count: Positive
    """Evenly spaced frames, the first and the last among them; 2: these two; 1: the middle one. Of a preview with fewer
    frames at most all.
    """
    combine: Literal["mean", "worst", "together"] = "mean"
    """The ``mean`` of their scores, or the ``worst``, which is the lowest. ``together``, for ``judge`` and
    ``videoreward``: one question about all of them, in their order.
    """


class RewardConfig(Section):
    kind: str
    """A registered reward (docs/guides/rewards.md) or an own function, ``module:function`` or ``file.py:function``."""
    path: str = ""
    """Folder or Hugging Face id of the reward's checkpoint."""
    base: str = ""
    """Folder or Hugging Face id of the checkpoint it builds on: tokenizer and image processor of ``pickscore``,
    tokenizer of ``imagereward``, CLIP model of ``aesthetic``, Qwen2-VL of ``hpsv3`` and
    ``videoreward``."""
    weight: float = 1.0
    """Its factor in the sum of all rewards."""
    normalize: Normalization | None = None
    """Brings the reward to a common scale before it is weighted."""
    preprocessing: Literal["checkpoint", "torchvision"] = "checkpoint"
    """For ``clipscore``: the image processor of the checkpoint, or the bilinear one of the published figures."""
    reference_weight: AtLeastZero = 0.2
    """For ``clip_edit``: weight of the cosine with the reference picture; that of the cosine with the prompt is 1."""
    frames: Frames | None = None
    """Of videos; null for a reward that takes whole videos: ``motion``, and own functions whose first parameter is
    ``video`` or ``videos``.
    """
    enough: AboveZero | None = None
    """For ``motion``: the change from frame to frame, of a range of 1, that scores 1; more scores no more."""
    remote: Remote | None = None
    """The server, for kind ``remote``."""
    judge: JudgeConfig | None = None
    """The model and what it is asked, for kind ``judge``."""
    reproducible: bool | None = None
    """Whether the same picture always gets the same score; null: yes, except for ``judge``. If one reward does not, the
    first score of a unit counts, late units are not repeated, and digests of equal runs may differ.
    """
    _own: OwnCode | None = PrivateAttr(default=None)
    """The files, attached for workers; see `config.own_functions`."""


def evenly_spaced(frames: int, count: int) -> list[int]:
    """Positions of `count` frames, all if no more: first, last and evenly spaced ones between; of one the middle."""
    if count == 1:
        return [frames // 2]
    count = min(count, frames)
    return [round(i * (frames - 1) / (count - 1)) for i in range(count)] if count > 1 else [0]
