"""The entries of the section `rewards`: kind, weight, checkpoint or server, and the scored frames of a video."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import PrivateAttr

from solrl_ray.common.own_code import OwnCode
from solrl_ray.config.section import AboveZero, AtLeastZero, Location, Natural, Positive, Seconds, Section


class Normalization(Section):
    """Normalisation of a reward: (reward - mean) / std. The numbers are fixed, because a score must not depend on
    earlier scores.
    """

    mean: float
    """Mean of the reward on images of your base model."""
    std: AboveZero
    """Standard deviation of the reward on images of your base model."""


class Remote(Section):
    """A reward server. Its protocol is documented in docs/guides/rewards.md."""

    url: str
    """URL to which batches are posted, such as ``http://rewards.internal:8000/score``."""
    timeout: Seconds = 60.0
    """Time limit per attempt, seconds."""
    retries: Natural = 3
    """Retries after a temporary failure."""
    token_variable: str = ""
    """Environment variable that holds the server's bearer token. It must be set on every machine that scores."""
    references: bool = False
    """Also send each prompt's reference images to the server."""


class Question(Section):
    """The question for a judge about an image, and the conversion of its answer to a score between 0 and 1."""

    text: Location
    """Text of the question. ``{prompt}`` is replaced by the image's prompt. A question for a number should state `low`
    and `high`.
    """
    references: bool = False
    """Show the prompt's reference images before the image."""
    answer: Literal["number", "yes"] = "number"
    """``number``: the number in the answer, between `low` and `high`. ``yes``: the probability of "yes" against "no",
    from the first token's log-probabilities.
    """
    low: float = 0.0
    """Number that scores 0."""
    high: float = 10.0
    """Number that scores 1."""
    pattern: str = ""
    """Regular expression that locates the number in the answer: the number begins at the expression's group, or at its
    match if it has no group. All matches must give the same number. Empty: the answer is only the number, requested as
    JSON if the endpoint supports it.
    """
    max_tokens: Positive = 16
    """Maximum number of tokens of an answer; reasoning takes hundreds. A truncated answer has no score."""


class JudgeConfig(Section):
    """A vision-language model that scores images through an OpenAI-compatible chat API: vLLM, SGLang or a service."""

    url: str
    """Base URL of the API, such as ``http://127.0.0.1:8000/v1``."""
    model: Location
    """Model name at the endpoint."""
    question: Question
    timeout: Seconds = 60.0
    """Time limit per attempt, seconds."""
    retries: Natural = 3
    """Retries after a temporary failure, or after an answer without a score."""
    concurrency: Positive = 8
    """Concurrent requests per worker, one image each."""
    token_variable: str = ""
    """Environment variable that holds the endpoint's bearer token. It must be set on every machine that scores."""
    request: dict[str, Any] = {}
    """Additional or replaced fields of every request, such as ``{chat_template_kwargs: {enable_thinking: false}}``.
    null removes a field: ``{max_tokens: null, max_completion_tokens: 16}``.
    """


class Frames(Section):
    """The frames of a video that a reward scores, and the combination of their scores."""

    count: Positive
    """Number of evenly spaced frames, including the first and the last; 2: these two; 1: the middle frame. A preview
    with fewer frames is scored on all of them.
    """
    combine: Literal["mean", "worst", "together"] = "mean"
    """``mean``: the mean of the frames' scores. ``worst``: the lowest of them. ``together``, for ``judge`` and
    ``videoreward``: one question about all frames, in their order.
    """


class RewardConfig(Section):
    kind: str
    """A registered reward (docs/guides/rewards.md) or your function, ``module:function`` or ``file.py:function``."""
    path: str = ""
    """Folder or Hugging Face id of the reward's checkpoint."""
    base: str = ""
    """Folder or Hugging Face id of the base checkpoint: tokenizer and image processor of ``pickscore``, tokenizer of
    ``imagereward``, CLIP model of ``aesthetic``, Qwen2-VL of ``hpsv3`` and ``videoreward``.
    """
    weight: float = 1.0
    """Weight of the reward in the sum of all rewards."""
    normalize: Normalization | None = None
    """Normalises the reward to a common scale before it is weighted."""
    preprocessing: Literal["checkpoint", "torchvision"] = "checkpoint"
    """For ``clipscore``: ``checkpoint`` is the checkpoint's image processor, ``torchvision`` the bilinear resizing of
    the published results.
    """
    reference_weight: AtLeastZero = 0.2
    """For ``clip_edit``: weight of the cosine similarity with the reference image; the similarity with the prompt has
    weight 1.
    """
    frames: Frames | None = None
    """Frames of a video to score; null for rewards that take whole videos: ``motion``, and your functions whose first
    parameter is ``video`` or ``videos``.
    """
    enough: AboveZero | None = None
    """For ``motion``: the change between consecutive frames that scores 1, with pixel values in [0, 1]. A larger change
    scores no more.
    """
    remote: Remote | None = None
    """For ``remote``: the reward server."""
    judge: JudgeConfig | None = None
    """For ``judge``: the model and the question."""
    reproducible: bool | None = None
    """Whether the same image always gets the same score; null: yes, except for ``judge``. If any reward is not
    reproducible, the first score of a unit counts, late units are not repeated, and digests of equal runs may differ.
    """
    _own: OwnCode | None = PrivateAttr(default=None)
    """Source files of the function, attached for workers; see `config.own_functions`."""


def evenly_spaced(frames: int, count: int) -> list[int]:
    """Positions of `count` evenly spaced frames, including the first and the last; the middle one if `count` is 1; all
    frames if there are no more than `count`.
    """
    if count == 1:
        return [frames // 2]
    count = min(count, frames)
    return [round(i * (frames - 1) / (count - 1)) for i in range(count)] if count > 1 else [0]
