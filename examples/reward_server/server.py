"""A reward server: scores over HTTP how red an image is. docs/guides/rewards.md has the protocol.

python examples/reward_server/server.py 8900
solrl train demo examples/reward_server/reward.yaml --set run.name=served

It needs numpy and Pillow, but not solrl_ray, so it can run in another environment and on another GPU. If REWARD_TOKEN
is set, it answers only requests with that token.
"""

from __future__ import annotations

import base64
import hmac
import io
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from PIL import Image

TOKEN = os.environ.get("REWARD_TOKEN", "")


def score(picture: np.ndarray, prompt: str) -> float:
    """Score of one image, uint8 [H, W, 3]. Replace it by yours: equal images and prompts must get equal scores."""
    red, green, blue = picture.mean(axis=(0, 1)) / 255
    return float(red - (green + blue) / 2)


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        if TOKEN and not hmac.compare_digest(self.headers.get("Authorization", ""), f"Bearer {TOKEN}"):
            self.answer(401, {"error": "no such token"})
            return
        try:
            batch = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            pictures = [np.asarray(Image.open(io.BytesIO(base64.b64decode(image)))) for image in batch["images"]]
            pairs = list(zip(pictures, batch["prompts"], strict=True))
        except (KeyError, TypeError, ValueError, OSError) as error:
            self.answer(400, {"error": f"{type(error).__name__}: {error}"})  # ends the run with this message
            return
        try:
            self.answer(200, {"scores": [score(picture, prompt) for picture, prompt in pairs]})
        except Exception as error:  # any error of scoring: the run retries after 5xx
            self.answer(500, {"error": f"{type(error).__name__}: {error}"})
            raise

    def answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
