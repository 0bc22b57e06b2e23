"""A reward by comparing two images of a prompt, like UnifiedReward, as in Pref-GRPO's training (arXiv 2508.20751).

python examples/judge/stand_in.py 8901
solrl train demo --set "rewards=[{kind: 'examples/pairwise/preferred.py:wins', reproducible: false}]"

To use a real model, start for example `vllm serve CodeGoat24/UnifiedReward-qwen-7b` instead of the stand-in, and set
JUDGE_URL, JUDGE_MODEL and, if it needs a token, JUDGE_TOKEN on every machine that scores.

Each call compares its images with each other: `rollout.explore.micro_batch` or `rollout.regenerate.micro_batch` seeds
of a prompt. Scores are comparable only within a call, so set `rollout.regenerate.micro_batch` to `rollout.keep`. The
mean score is 1/2, however good the images are: track progress with another reward (`solrl eval RUN --rewards
clipscore`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from solrl_ray.rewards.endpoint import Endpoint, TryAgain, png
from solrl_ray.rewards.preprocessing import eight_bits

RIVALS = 4
"""Number of comparisons in which an image is shown first, and again second: judges may prefer one position."""
AT_A_TIME = 8
"""Concurrent requests."""
QUESTION = """Two pictures were drawn for this text: "{prompt}". Compare them: which one shows better what the text
says, and which one looks better? End with one of these sentences:
Image 1 is better.
Image 2 is better.
Both images are equally good."""
ANSWER = re.compile(r"Image ([12]) is better|(equally good)", re.IGNORECASE)


def wins(images: Tensor, prompts: list[str]) -> list[float]:
    """The share of its comparisons that an image wins, 0 to 1; a draw counts 1/2, and an image without rivals gets 1/2.

    Images are float32 [B, 3, H, W] in 0 … 1. Equal images count as one, as the last batch of a prompt may repeat some.
    """
    shown = list(zip(prompts, map(png, eight_bits(images).to("cpu", torch.uint8)), strict=True))
    pairs = [
        (first, second, prompt)
        for prompt in dict.fromkeys(prompts)
        for first, second in meetings(list(dict.fromkeys(picture for text, picture in shown if text == prompt)))
    ]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        shares = list(pool.map(share_of_first, *zip(*pairs, strict=True))) if pairs else []
    results: dict[tuple[str, str], list[float]] = {}
    for (first, second, prompt), share in zip(pairs, shares, strict=True):
        results.setdefault((prompt, first), []).append(share)
        results.setdefault((prompt, second), []).append(1 - share)
    own = [results.get(each, [0.5]) for each in shown]
    return [sum(each) / len(each) for each in own]


def meetings(pictures: list[str]) -> list[tuple[str, str]]:
    """Ordered pairs to compare, (shown first, shown second): each image with the next `RIVALS` in a circle."""
    count = len(pictures)
    return [
        (pictures[i], pictures[(i + n) % count]) for n in range(1, min(RIVALS, count - 1) + 1) for i in range(count)
    ]


def share_of_first(first: str, second: str, prompt: str) -> float:
    """1 if the judge prefers the first of two images (base64 of PNG files), 0 if the second, 0.5 if neither."""
    pictures = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{each}"}} for each in (first, second)
    ]
    question = {"type": "text", "text": QUESTION.replace("{prompt}", prompt)}
    request = {
        "model": os.environ.get("JUDGE_MODEL", "stand-in"),
        "messages": [{"role": "user", "content": [*pictures, question]}],
        "max_tokens": 1024,
        "temperature": 0.0,
    }
    url = os.environ.get("JUDGE_URL", "http://127.0.0.1:8901/v1") + "/chat/completions"
    endpoint = Endpoint("wins", url, token=os.environ.get("JUDGE_TOKEN", ""), timeout=60, retries=3)
    body = json.dumps(request).encode()
    return endpoint.ask(body, hashlib.sha256(body).hexdigest(), read)


def read(answer: bytes) -> float:
    try:
        text = json.loads(answer)["choices"][0]["message"]["content"]
        *_, last = ANSWER.finditer(text)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise TryAgain(f"{answer[:500]!r} has none of the expected sentences, such as 'Image 1 is better.'") from error
    return {"1": 1.0, "2": 0.0, None: 0.5}[last[1]]
