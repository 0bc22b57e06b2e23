"""What a judge says to a run, without a vision-language model: a stand-in with OpenAI's chat interface.

python examples/judge/stand_in.py 8901
solrl train demo examples/judge/judge.yaml --set run.name=judged

With a model, start for example `vllm serve Qwen/Qwen2.5-VL-7B-Instruct` in its place, and name its address and its name
in judge.yaml. The stand-in looks for the colours that are named in the question.
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
"""Share of the pixels, those nearest to a colour, that stand for it."""


def opinion(picture: np.ndarray, question: str) -> str:
    """A text, as a model would write it; `picture` is uint8 [H, W, 3]."""
    marks = [10 * likeness(picture, colour) for colour in COLOURS if f" {colour} " in question]
    return f"I looked for {len(marks)} colours. Mark: {sum(marks) / max(len(marks), 1):.2f}"


def likeness(picture: np.ndarray, colour: str) -> float:
    """0 to 1: how near the nearest pixels come to a colour."""
    away = np.abs(picture / 255 - np.array(ImageColor.getrgb(colour)) / 255).mean(axis=2).ravel()
    return float(1 - np.sort(away)[: max(1, round(NEAREST * away.size))].mean())


def completion(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request of the chat interface with a picture and a text."""
    parts = {part["type"]: part for part in request["messages"][0]["content"]}
    data = parts["image_url"]["image_url"]["url"].partition(",")[2]
    picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))
    message = {"role": "assistant", "content": opinion(picture, parts["text"]["text"])}
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
        """Nothing: a run asks thousands of times."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
