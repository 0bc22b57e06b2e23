"""A vision-language model as judge: asked about each picture through OpenAI's chat interface, over HTTP."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from solrl_ray.config.schema import Judge as JudgeConfig
from solrl_ray.config.schema import Question, RewardConfig
from solrl_ray.errors import UserError
from solrl_ray.rewards.base import CheckpointReward, Keys
from solrl_ray.rewards.endpoint import Endpoint, TryAgain, check_reachable, check_url, png, token_of
from solrl_ray.rewards.preprocessing import eight_bits

ALTERNATIVES = 20
"""Most likely first tokens to request, the interface's maximum."""
PROMPT = "{prompt}"
TOKENS = ("prompt_tokens", "completion_tokens")
"""Token counts of an answer, also their names in metrics."""


class Judge(CheckpointReward):
    """One request a picture, `concurrency` at a time; the answer's number, or its probability of "yes", is the score,
    between 0 and 1.

    An answer without a score is requested again, like a missing one. Equal pictures of equal prompts are asked about
    once, as long as their score is cached.
    """

    options = required = frozenset({"judge"})

    def __init__(self, name: str, config: JudgeConfig, token: str) -> None:
        super().__init__(name)
        self._config = config
        url = config.url.rstrip("/") + "/chat/completions"
        self._endpoint = Endpoint(name, url, token=token, timeout=config.timeout, retries=config.retries)
        self._known: OrderedDict[str, float] = OrderedDict()
        """Digest of the request → score, the longest unused first."""

    @classmethod
    def check(cls, config: RewardConfig, keys: Keys, resolution: int) -> None:
        judge, _ = _settings(config, keys)
        check_reachable(judge.url, keys("judge.url"), judge.timeout, "start the judge first")

    @classmethod
    def load(cls, config: RewardConfig, device: torch.device | str, *, keys: Keys, name: str) -> Judge:
        return cls(name, *_settings(config, keys))

    def compute(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        pictures = eight_bits(images).to("cpu", torch.uint8)
        bodies = [self._body(picture, prompt) for picture, prompt in zip(pictures, prompts, strict=True)]
        digests = [hashlib.sha256(body).hexdigest() for body in bodies]
        scores = {digest: self._known[digest] for digest in digests if digest in self._known}
        asked = {digest: body for digest, body in zip(digests, bodies, strict=True) if digest not in scores}
        self._endpoint.count(remembered=len(bodies) - len(asked))
        pool = ThreadPoolExecutor(self._config.concurrency, "judge")
        try:
            answers = pool.map(self._score, asked.values(), asked)
            scores |= dict(zip(asked, answers, strict=True))
        finally:
            pool.shutdown(cancel_futures=True)
        self._remember(scores)
        return torch.tensor([scores[digest] for digest in digests], dtype=torch.float32)

    def take_costs(self) -> dict[str, int]:
        return self._endpoint.take_costs()

    def _score(self, body: bytes, identity: str) -> float:
        return self._endpoint.ask(body, identity, self._read)

    def _body(self, picture: Tensor, prompt: str) -> bytes:
        question = self._config.question
        content = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png(picture)}"}},
            {"type": "text", "text": question.text.replace(PROMPT, prompt)},
        ]
        request: dict[str, Any] = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": question.max_tokens,
            "temperature": 0.0,
        }
        if question.answer == "yes":
            request |= {"max_tokens": 1, "logprobs": True, "top_logprobs": ALTERNATIVES}
        return json.dumps(request | self._config.request).encode()

    def _read(self, answer: bytes) -> float:
        try:
            content = json.loads(answer)
            usage = content.get("usage") or {}
            self._endpoint.count(**{name: int(usage.get(name) or 0) for name in TOKENS})
            return score(self._config.question, content["choices"][0])
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise TryAgain(f"the answer {answer[:500].decode(errors='replace')!r} has no score ({error})") from error

    def _remember(self, scores: Mapping[str, float]) -> None:
        for digest, value in scores.items():
            self._known[digest] = value
            self._known.move_to_end(digest)
        while len(self._known) > self._config.remember:
            self._known.popitem(last=False)


def score(question: Question, choice: Mapping[str, Any]) -> float:
    """The score of a chat completion's choice, between 0 and 1.

    Raises ValueError if it has no score; KeyError, TypeError or IndexError if it is no such choice.
    """
    if question.answer == "yes":
        return probability_of_yes(choice["logprobs"]["content"][0]["top_logprobs"])
    text = choice["message"]["content"]
    found = [match.group(match.re.groups and 1) for match in re.finditer(question.pattern, text)]
    if not found:
        raise ValueError(f"nothing in it matches {question.pattern!r}")
    value = float(found[-1])
    if not question.low <= value <= question.high:
        raise ValueError(f"{value:g} is not between {question.low:g} and {question.high:g}")
    return (value - question.low) / (question.high - question.low)


def probability_of_yes(alternatives: Sequence[Mapping[str, Any]]) -> float:
    """For the first token: P(yes) / (P(yes) + P(no)), summed over spellings. Raises ValueError if it is neither."""
    total = {"yes": 0.0, "no": 0.0}
    for entry in alternatives:
        word = entry["token"].strip().lower()
        if word in total:
            total[word] += math.exp(entry["logprob"])
    if not sum(total.values()) > 0:
        raise ValueError("neither yes nor no is among the most likely first tokens")
    return total["yes"] / sum(total.values())


def _settings(config: RewardConfig, keys: Keys) -> tuple[JudgeConfig, str]:
    """The section and the token. Raises UserError for impossible values."""
    judge = config.judge
    assert judge is not None
    check_url(judge.url, keys("judge.url"), "http://127.0.0.1:8000/v1")
    question = judge.question
    if not question.low < question.high:
        raise UserError(f"{keys('judge.question.high')} is {question.high:g}; it must be above low, {question.low:g}.")
    try:
        groups = re.compile(question.pattern).groups
    except re.error as error:
        raise UserError(
            f"{keys('judge.question.pattern')} is {question.pattern!r}, which is no regular expression: {error}."
        ) from None
    if groups > 1:
        raise UserError(
            f"{keys('judge.question.pattern')} is {question.pattern!r}, which has {groups} groups; at most one can be "
            "the number."
        )
    return judge, token_of(judge.token_variable, keys("judge.token_variable"))
