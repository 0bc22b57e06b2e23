"""A reward that another process computes, over HTTP. The protocol is in docs/rewards.md."""

from __future__ import annotations

import base64
import hashlib
import http.client
import io
import json
import os
import socket
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

import torch
from PIL import Image
from torch import Tensor

from solrl_ray.config.schema import Remote as RemoteConfig
from solrl_ray.config.schema import RewardConfig
from solrl_ray.errors import RewardError, UserError
from solrl_ray.rewards.base import CheckpointReward, Keys
from solrl_ray.rewards.preprocessing import eight_bits

PAUSE = 0.5
"""Seconds before the first retry; doubled for each further one."""
CHUNK = 65536
MAX_ANSWER = 16 * 2**20
"""Bytes; a score takes some 20."""
CONNECT_CHECK = 5.0
"""Longest that the check before a run waits for the server, seconds."""


class _Again(Exception):
    """A failure that may pass: no connection, a timeout, a busy or failing server."""


class RemoteReward(CheckpointReward):
    """Posts images as PNG with their prompts, and reads one score an image.

    A request is repeated, under the same id, when the server cannot be reached, takes longer than the timeout or
    answers 429 or 5xx. Every other answer that is not B finite numbers ends the run with the server's own words: a
    failed reward is never a number.
    """

    options = required = frozenset({"remote"})

    def __init__(self, name: str, config: RemoteConfig, token: str) -> None:
        super().__init__(name)
        self._config = config
        self._url = urlsplit(config.url)
        self._token = token

    @classmethod
    def check(cls, config: RewardConfig, keys: Keys, resolution: int) -> None:
        remote, _ = _settings(config, keys)
        url = urlsplit(remote.url)
        assert url.hostname
        try:
            socket.create_connection((url.hostname, _port(url)), min(remote.timeout, CONNECT_CHECK)).close()
        except OSError as error:
            raise UserError(
                f"{keys('remote.url')} is {remote.url!r}, but nothing answers there: {error}; "
                "start the reward server first."
            ) from error

    @classmethod
    def load(cls, config: RewardConfig, device: torch.device | str, *, keys: Keys, name: str) -> RemoteReward:
        return cls(name, *_settings(config, keys))

    def compute(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        content = {"images": [_png(image) for image in eight_bits(images).to("cpu", torch.uint8)], "prompts": prompts}
        identity = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        body = json.dumps({"request": identity} | content).encode()
        attempts = self._config.retries + 1
        for attempt in range(attempts):
            try:
                return self._scores(self._post(body, identity), len(images))
            except _Again as error:
                if attempt + 1 == attempts:
                    raise RewardError(
                        f"Reward {self.name} got no scores from {self._config.url} in {attempts} attempts of at most "
                        f"{self._config.timeout:g} s; the last one: {error}."
                    ) from error
                time.sleep(PAUSE * 2**attempt)
        raise AssertionError("unreachable")

    def _post(self, body: bytes, identity: str) -> bytes:
        """The body of the answer. Raises _Again, or RewardError for a refusal."""
        deadline = time.monotonic() + self._config.timeout
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        assert self._url.hostname
        connection = kind(self._url.hostname, _port(self._url), timeout=self._config.timeout)
        headers = {"Content-Type": "application/json", "X-Request-Id": identity}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        target = (self._url.path or "/") + (f"?{self._url.query}" if self._url.query else "")
        try:
            connection.request("POST", target, body, headers)
            response = connection.getresponse()
            answer = _read(response, connection, deadline)
        except (OSError, http.client.HTTPException) as error:
            raise _Again(f"{type(error).__name__} {error}".strip()) from error
        finally:
            connection.close()
        if response.status == 200:
            return answer
        words = f"{response.status} {response.reason}: {' '.join(answer.decode(errors='replace').split())[:500]}"
        if response.status == 429 or response.status >= 500:
            raise _Again(words)
        raise RewardError(f"Reward {self.name} was refused by {self._config.url}: {words}.")

    def _scores(self, answer: bytes, count: int) -> Tensor:
        shown = answer[:200].decode(errors="replace")
        try:
            scores = json.loads(answer)["scores"]
        except (ValueError, KeyError, TypeError) as error:
            raise RewardError(
                f'Reward {self.name} got {shown!r} from {self._config.url}; right would be {{"scores": [...]}}.'
            ) from error
        if not isinstance(scores, list) or not all(_is_number(score) for score in scores) or len(scores) != count:
            raise RewardError(
                f"Reward {self.name} got {shown!r} from {self._config.url}; right would be {count} numbers in 'scores'."
            )
        return torch.tensor(scores, dtype=torch.float32)


def _read(response: http.client.HTTPResponse, connection: http.client.HTTPConnection, deadline: float) -> bytes:
    """The whole answer; a server that sends it byte by byte does not prolong the deadline."""
    answer = b""
    while part := response.read1(CHUNK):
        answer += part
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out while the answer was arriving")
        if len(answer) > MAX_ANSWER:
            raise http.client.HTTPException(f"an answer of more than {MAX_ANSWER} bytes")
        if connection.sock is not None:
            connection.sock.settimeout(left)
    return answer


def _settings(config: RewardConfig, keys: Keys) -> tuple[RemoteConfig, str]:
    """The section and the token. Raises UserError for an address or variable that cannot be right."""
    remote = config.remote
    assert remote is not None
    try:
        url = urlsplit(remote.url)
        usable = url.scheme in ("http", "https") and bool(url.hostname) and _port(url) > 0 and "@" not in url.netloc
    except ValueError:
        usable = False
    if not usable:
        raise UserError(
            f"{keys('remote.url')} is {remote.url!r}; it must be an address such as "
            "'http://rewards.internal:8000/score', without a password in it."
        )
    token = os.environ.get(remote.token_variable, "") if remote.token_variable else ""
    if remote.token_variable and not token:
        raise UserError(
            f"{keys('remote.token_variable')} is {remote.token_variable!r}, but that environment variable is not set; "
            "set it to the server's token."
        )
    return remote, token


def _port(url: SplitResult) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


def _png(image: Tensor) -> str:
    """uint8 [3, H, W] as base64 of a PNG file."""
    file = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(file, "PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode("ascii")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
