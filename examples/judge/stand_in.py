"""A stand-in for a judge, without a vision-language model: a server with OpenAI's chat interface.

python examples/judge/stand_in.py 8901
solrl train demo examples/judge/judge.yaml --set run.name=judged

To use a real model, start for example `vllm serve Qwen/Qwen2.5-VL-7B-Instruct` instead, and set its address and name in
judge.yaml. The stand-in looks for the colours that the question names. Of two images it prefers the one that shows them
better (examples/pairwise).
"""

from __future__ import annotations

import base64
import io
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from PIL import Image, ImageColor

COLOURS = ("red", "green", "blue", "yellow", "purple", "orange", "cyan", "pink")
NEAREST = 0.05
"""Share of the pixels that measure a colour: those nearest to it."""


def opinion(pictures: list[np.ndarray], question: str) -> str:
    """The answer as a model would write it; images are uint8 [H, W, 3]."""
    colours = [colour for colour in COLOURS if f" {colour} " in question]
    marks = [10 * sum(likeness(each, colour) for colour in colours) / max(len(colours), 1) for each in pictures]
    if len(marks) == 2:
        preferred = f"Image {1 + marks.index(max(marks))} is better." if marks[0] != marks[1] else ""
        return f"I looked for {len(colours)} colours. {preferred or 'Both images are equally good.'}"
    return f"I looked for {len(colours)} colours. Mark: {marks[0]:.2f}"


def likeness(picture: np.ndarray, colour: str) -> float:
    """How near the nearest pixels are to a colour, 0 to 1."""
    away = np.abs(picture / 255 - np.array(ImageColor.getrgb(colour)) / 255).mean(axis=2).ravel()
    return float(1 - np.sort(away)[: max(1, round(NEAREST * away.size))].mean())


def completion(request: dict[str, Any]) -> dict[str, Any]:
    """The response to a chat request with one or two images and a text."""
    parts = request["messages"][0]["content"]
    data = [part["image_url"]["url"].partition(",")[2] for part in parts if part["type"] == "image_url"]
    pictures = [np.asarray(Image.open(io.BytesIO(base64.b64decode(each))).convert("RGB")) for each in data]
    (text,) = [part["text"] for part in parts if part["type"] == "text"]
    message = {"role": "assistant", "content": opinion(pictures, text)}
    return {
        "object": "chat.completion",
        "model": request["model"],
        "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0},
    }


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        known = self.path == "/v1/chat/completions"
        answer = json.dumps(completion(json.loads(body)) if known else {"error": f"no such path: {self.path}"}).encode()
        self.send_response(200 if known else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        """Log nothing: a run sends thousands of requests."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
