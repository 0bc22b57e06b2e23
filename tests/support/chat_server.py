"""A server of OpenAI's chat interface on loopback, whose model is a Python function."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from tests.support.http_server import Quiet, listening


@dataclass
class Asked:
    """One request."""

    body: dict[str, Any]
    headers: dict[str, str]

    @property
    def pictures(self) -> list[np.ndarray]:
        """Each uint8 [H, W, 3]."""
        *shown, _ = self.body["messages"][0]["content"]
        urls = [part["image_url"]["url"].partition(",") for part in shown]
        assert {kind for kind, _, _ in urls} == {"data:image/png;base64"}
        return [np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))) for _, _, data in urls]

    @property
    def picture(self) -> np.ndarray:
        """The only one."""
        (picture,) = self.pictures
        return picture

    @property
    def text(self) -> str:
        found: str = self.body["messages"][0]["content"][-1]["text"]
        return found


@dataclass
class ChatServer:
    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    most_at_once: int = 0
    _present: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def enter(self, asked: Asked) -> None:
        with self._lock:
            self.asked.append(asked)
            self._present += 1
            self.most_at_once = max(self.most_at_once, self._present)

    def leave(self) -> None:
        with self._lock:
            self._present -= 1


Model = Callable[[Asked], "str | dict[str, float] | tuple[int, bytes]"]
"""What it answers: a text, the first token's probabilities, or a status and whatever it sends."""


def completion(answer: str | dict[str, float]) -> bytes:
    """As vLLM writes it."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
    if isinstance(answer, str):
        choice["message"] = {"role": "assistant", "content": answer}
    else:
        top = [{"token": token, "logprob": float(np.log(p))} for token, p in answer.items()]
        choice["message"] = {"role": "assistant", "content": next(iter(answer))}
        choice["logprobs"] = {"content": [{**top[0], "top_logprobs": top}]}
    usage = {"prompt_tokens": 100, "completion_tokens": 3, "total_tokens": 103}
    return json.dumps({"object": "chat.completion", "choices": [choice], "usage": usage}).encode()


@contextmanager
def serving(model: Model) -> Iterator[ChatServer]:
    found = ChatServer()

    class Handler(Quiet):
        def do_POST(self) -> None:
            asked = Asked(json.loads(self.read()), dict(self.headers))
            found.enter(asked)
            try:
                answer = model(asked) if self.path == "/v1/chat/completions" else (404, b"no such path")
            finally:
                found.leave()
            status, content = answer if isinstance(answer, tuple) else (200, completion(answer))
            self.answer(content, status)

    with listening(Handler) as url:
        found.url = f"{url}/v1"
        yield found
