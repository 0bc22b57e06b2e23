"""A reward computed by another process, over HTTP. docs/guides/rewards.md describes the protocol."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from solrl_ray.config.rewards import Remote as RemoteConfig
from solrl_ray.config.rewards import RewardConfig
from solrl_ray.errors import RewardError
from solrl_ray.records import SampleShape
from solrl_ray.rewards.base import CheckpointReward, Keys
from solrl_ray.rewards.endpoint import Endpoint, check_reachable, check_url, png, references_shown, token_of
from solrl_ray.rewards.preprocessing import eight_bits


class RemoteReward(CheckpointReward):
    """Posts images as PNG with their prompts, and reads one score per image. A retry has the id of its request."""

    def __init__(self, config: RewardConfig, device: torch.device | str, *, keys: Keys, name: str) -> None:
        super().__init__(config, device, keys=keys, name=name)
        remote, token = _settings(config, keys)
        self._url, self._references = remote.url, remote.references
        self._endpoint = Endpoint(name, remote.url, token=token, timeout=remote.timeout, retries=remote.retries)

    @classmethod
    def check(cls, config: RewardConfig, keys: Keys, shapes: Sequence[SampleShape]) -> None:
        _settings(config, keys)

    @classmethod
    def reach(cls, config: RewardConfig, keys: Keys, shapes: Sequence[SampleShape]) -> None:
        remote, _ = _settings(config, keys)
        check_reachable(remote.url, keys("remote.url"), remote.timeout, "start the reward server first")

    def compute(self, images: Tensor, prompts: Sequence[str], references: Tensor | None = None) -> Tensor:
        content: dict[str, Any] = {
            "images": [png(image) for image in eight_bits(images).to("cpu", torch.uint8)],
            "prompts": prompts,
        }
        if self._references:
            content["references"] = references_shown(references, len(images))
        identity = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        body = json.dumps({"request": identity} | content).encode()
        return self._endpoint.ask(body, identity, lambda answer: self._scores(answer, len(images)))

    def take_costs(self) -> dict[str, int]:
        return self._endpoint.take_costs()

    def _scores(self, answer: bytes, count: int) -> Tensor:
        shown = answer[:200].decode(errors="replace")
        try:
            scores = json.loads(answer)["scores"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RewardError(
                f'Reward {self.name} got {shown!r} from {self._url}; expected {{"scores": [...]}}.'
            ) from error
        given = scores if isinstance(scores, list) else []
        # Neither a bool, nor an integer too large for a float.
        numbers = [value for value in given if type(value) is float or (type(value) is int and abs(value) < 2**63)]
        if not len(numbers) == len(given) == count:
            raise RewardError(
                f"Reward {self.name} got {shown!r} from {self._url}; expected {count} numbers in 'scores'."
            )
        return torch.tensor([float(score) for score in numbers], dtype=torch.float32)


def _settings(config: RewardConfig, keys: Keys) -> tuple[RemoteConfig, str]:
    """The `remote` section and the token. Raises UserError if address or variable are invalid."""
    remote = config.remote
    assert remote is not None
    check_url(remote.url, keys("remote.url"), "http://rewards.internal:8000/score")
    return remote, token_of(remote.token_variable, keys("remote.token_variable"))
