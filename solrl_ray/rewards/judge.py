"""A vision-language model as judge: it is asked about each image through OpenAI's chat interface, over HTTP."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from solrl_ray.config.rewards import JudgeConfig, Question, RewardConfig, evenly_spaced
from solrl_ray.errors import RunError, UserError
from solrl_ray.records import SampleShape
from solrl_ray.rewards.base import IMAGES, VIDEOS, CheckpointReward, Keys
from solrl_ray.rewards.endpoint import (
    CONNECT_CHECK,
    Endpoint,
    FailedRequest,
    RefusedRequest,
    TryAgain,
    check_reachable,
    check_url,
    png,
    references_shown,
    token_of,
)
from solrl_ray.rewards.preprocessing import eight_bits

FORMAT_REFUSED = (400, 404, 422, 500, 501)
"""HTTP statuses of servers that do not support `response_format`."""
ALTERNATIVES = 20
"""Number of most likely first tokens to request; the interface's maximum."""
PROMPT = "{prompt}"
SHOWN = 500
"""Number of characters of an answer that a message shows."""
TOKENS = ("prompt_tokens", "completion_tokens")
"""Names of token counts, in an answer and in metrics."""
LIKELY = 0.5
"""Minimum probability that the first token is yes or no."""
NUMBER = re.compile(
    r"(?P<number>[-−]?(?:\d+(?:[.,]\d+)?|\.\d+)(?:[eE][-+]?\d+)?)"
    r"(?:\s*(?:/|(?:out )?of)\s*(?P<of>\d+(?:\.\d+)?)|\s*(?P<percent>%))?"
)
"""A number, maybe as a fraction or in percent."""
ALONE = re.compile(r"(?<![\w.,])" + NUMBER.pattern)
"""A number that is not the end of a word, such as SD3."""
REASONING = re.compile(r"<(think|thinking|thought|reasoning)>.*?(</\1>|\Z)|\A.*</think>", re.DOTALL)
"""A reasoning block. Its first tag may be missing (chat templates may contain it), or its end."""


class NoScore(ValueError):
    """An answer has no score; the message names the setting that would help."""


class Judge(CheckpointReward):
    """Sends one request per image, or per video with its chosen frames, `concurrency` at a time.

    If the question uses references, the prompt's reference images come first. The score is the number in the answer,
    or the probability of "yes", between 0 and 1. An answer without a score is requested again, like a missing answer.
    """

    ndims = (IMAGES, VIDEOS)

    def __init__(self, config: RewardConfig, device: torch.device | str, *, keys: Keys, name: str) -> None:
        super().__init__(config, device, keys=keys, name=name)
        judge, token = _settings(config, keys)
        self._config, self._frames = judge, config.frames.count if config.frames else 0
        url = judge.url.rstrip("/") + "/chat/completions"
        self._endpoint = Endpoint(name, url, token=token, timeout=judge.timeout, retries=judge.retries)
        self._format = {} if "response_format" in judge.request else _format(judge.question)
        self._format_works = False

    @classmethod
    def check(cls, config: RewardConfig, keys: Keys, shapes: Sequence[SampleShape]) -> None:
        _settings(config, keys)

    @classmethod
    def reach(cls, config: RewardConfig, keys: Keys, shapes: Sequence[SampleShape]) -> None:
        judge, _ = _settings(config, keys)
        check_reachable(judge.url, keys("judge.url"), judge.timeout, "start the judge first")
        quick = judge.model_copy(update={"retries": 0, "timeout": min(judge.timeout, CONNECT_CHECK)})
        largest = max(shapes, key=lambda shape: shape.pixels)  # only one question: servers may charge for each
        try:
            grey = torch.full((1, 3, largest.height, largest.width), 0.5)
            once = cls(config.model_copy(update={"judge": quick}), "cpu", keys=keys, name="judge")
            once.score(grey, ["a grey picture"], grey[:, None])
        except RefusedRequest as refusal:
            remedies = {401: "judge.token_variable", 403: "judge.token_variable", 404: "judge.url or judge.model"}
            raise UserError(
                f"{keys('judge.url')} is {judge.url!r}, which refuses a question to judge.model {judge.model!r}: "
                f"{refusal.words}; set {remedies.get(refusal.status, 'judge.request')} to a value the server accepts."
            ) from None
        except RunError:
            pass  # the server may be slow or busy now, or give this image no score: only the run's attempts count

    def compute(self, images: Tensor, prompts: Sequence[str], references: Tensor | None = None) -> Tensor:
        if images.ndim == IMAGES:
            images = images.unsqueeze(2)
        else:
            images = images[:, :, evenly_spaced(images.shape[2], self._frames)]
        shown = references_shown(references, len(images)) if self._config.question.references else [[]] * len(images)
        rows = zip(eight_bits(images).to("cpu", torch.uint8).transpose(1, 2), prompts, shown, strict=True)
        bodies = [self._body([*references, *map(png, frames)], prompt) for frames, prompt, references in rows]
        pool = ThreadPoolExecutor(self._config.concurrency, "judge")
        try:
            return torch.tensor(list(pool.map(self._score, bodies)), dtype=torch.float32)
        finally:
            pool.shutdown(cancel_futures=True)

    def take_costs(self) -> dict[str, int]:
        return self._endpoint.take_costs()

    def _score(self, body: bytes) -> float:
        identity = hashlib.sha256(body).hexdigest()
        if form := self._format:
            try:
                scored = self._endpoint.ask(json.dumps(form | json.loads(body)).encode(), identity, self._read)
            except FailedRequest as error:
                # A server that took the format before has failed for another reason: a retry must not change scores.
                if self._format_works or error.status not in FORMAT_REFUSED:
                    raise
            else:
                self._format_works = True
                return scored
            scored = self._endpoint.ask(body, identity, self._read)
            self._format = {}  # the server can score, but without `response_format`
            return scored
        return self._endpoint.ask(body, identity, self._read)

    def _body(self, images: Sequence[str], prompt: str) -> bytes:
        """The request body of a question with these images, which are in base64."""
        question = self._config.question
        urls = [{"url": f"data:image/png;base64,{image}"} for image in images]
        content: list[dict[str, Any]] = [{"type": "image_url", "image_url": url} for url in urls]
        content.append({"type": "text", "text": question.text.replace(PROMPT, prompt)})
        request: dict[str, Any] = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": question.max_tokens,
            "temperature": 0.0,
        }
        if question.answer == "yes":
            request |= {"max_tokens": 1, "logprobs": True, "top_logprobs": ALTERNATIVES}
        fields = request | self._config.request
        return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()

    def _read(self, answer: bytes) -> float:
        try:
            content = json.loads(answer)
            usage = content.get("usage") or {}
            self._endpoint.count(**{name: int(usage.get(name) or 0) for name in TOKENS})
            choice = content["choices"][0]
            text = choice["message"]["content"] or ""  # null: a reasoning model has not reached its answer
            return score(self._config.question, choice)
        except NoScore as error:
            raise TryAgain(f"the answer {text[-SHOWN:]!r} has no score: {error}") from error
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise TryAgain(f"{answer[:SHOWN].decode(errors='replace')!r} is no chat completion") from error


def score(question: Question, choice: Mapping[str, Any]) -> float:
    """The score of a chat completion's choice, between 0 and 1.

    Raises NoScore if it has none; KeyError, TypeError or IndexError if `choice` is malformed.
    """
    if question.answer == "yes":
        return probability_of_yes(_alternatives(choice))
    if choice.get("finish_reason") == "length":
        raise NoScore(f"it was cut at judge.question.max_tokens, {question.max_tokens}; allow more")
    text = REASONING.sub("", choice["message"]["content"] or "")
    if question.pattern:
        places = [match.start(match.re.groups and 1) for match in re.finditer(question.pattern, text)]
        numbers = [NUMBER.match(text, place) for place in places if place >= 0]
    else:
        numbers = list(ALONE.finditer(text))
    values = {_value(number, question) for number in numbers if number}
    if not values:
        where = f" where judge.question.pattern, {question.pattern!r}, matches" if question.pattern else ""
        raise NoScore(f"it has no number{where}")
    if len(values) > 1:
        several = " and ".join(f"{value:g}" for value in sorted(values))
        raise NoScore(f"it has several numbers, {several}; set judge.question.pattern to select one")
    (value,) = values
    if not question.low <= value <= question.high:
        raise NoScore(
            f"{value:g} is not between judge.question.low, {question.low:g}, and judge.question.high, {question.high:g}"
        )
    return (value - question.low) / (question.high - question.low)


def probability_of_yes(alternatives: Sequence[Mapping[str, Any]]) -> float:
    """P(yes) / (P(yes) + P(no)) of the first token, summed over spellings. Raises NoScore if it is likely neither."""
    total = {"yes": 0.0, "no": 0.0}
    for entry in alternatives:
        word = entry["token"].strip().lower()
        if word in total:
            total[word] += math.exp(min(entry["logprob"], 0.0))
    if not sum(total.values()) >= LIKELY:
        raise NoScore(
            "its first token is probably neither yes nor no; let judge.question.text ask for one of them, or "
            "set judge.question.answer to 'number'"
        )
    return total["yes"] / sum(total.values())


def _alternatives(choice: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The most likely first tokens. Raises NoScore if the server gave none."""
    try:
        tokens: Sequence[Mapping[str, Any]] = choice["logprobs"]["content"][0]["top_logprobs"]
        return tokens
    except (KeyError, TypeError, IndexError):
        raise NoScore(
            "it came without log-probabilities, which judge.question.answer 'yes' needs; if the server gives none, "
            "set judge.question.answer to 'number'"
        ) from None


def _value(match: re.Match[str], question: Question) -> float:
    """A number on the question's scale: 7.5, 7,5 and 7.5/10 are the same. Raises NoScore for another scale."""
    number = match["number"].replace("−", "-")
    if re.search(r",\d{3}(?!\d)", number):
        raise NoScore(f"{number} is ambiguous: the comma may mark a fraction or thousands")
    value, of = float(number.replace(",", ".")), 100.0 if match["percent"] else float(match["of"] or question.high)
    if of == question.high:
        return value
    if question.low or not 0 < of < math.inf:
        raise NoScore(f"{match[0]} is not on the scale from {question.low:g} to {question.high:g}")
    return value / of * question.high


def _format(question: Question) -> dict[str, Any]:
    """The request field that asks for a JSON object with only the number; empty if the answer needs more than that."""
    if question.answer == "yes" or question.pattern:
        return {}
    number = {"type": "number", "minimum": question.low, "maximum": question.high}
    schema = {"type": "object", "properties": {"score": number}, "required": ["score"], "additionalProperties": False}
    form = {"name": "score", "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": form}}


def _settings(config: RewardConfig, keys: Keys) -> tuple[JudgeConfig, str]:
    """The `judge` section and the token. Raises UserError if a value is invalid."""
    judge = config.judge
    assert judge is not None
    check_url(judge.url, keys("judge.url"), "http://127.0.0.1:8000/v1")
    question = judge.question
    if not question.low < question.high:
        raise UserError(f"{keys('judge.question.high')} is {question.high:g}; it must be above low, {question.low:g}.")
    for bound in (question.low, question.high) if question.answer == "number" else ():
        if not re.search(rf"(?<![\d.]){re.escape(f'{bound:g}')}(?![\d]|\.\d)", question.text):
            raise UserError(
                f"{keys('judge.question.text')} does not name {bound:g}; it must ask for a number from low, "
                f"{question.low:g}, to high, {question.high:g}."
            )
    try:
        groups = re.compile(question.pattern).groups
    except re.error as error:
        raise UserError(
            f"{keys('judge.question.pattern')} is {question.pattern!r}, which is no regular expression: {error}."
        ) from None
    if groups > 1:
        raise UserError(
            f"{keys('judge.question.pattern')} is {question.pattern!r}, which has {groups} groups; keep only the group "
            "of the number."
        )
    return judge, token_of(judge.token_variable, keys("judge.token_variable"))
