"""The remote reward against real servers on loopback, most of which misbehave."""

from __future__ import annotations

import base64
import io
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from io import BufferedIOBase
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from PIL import Image

from solrl_ray import rewards
from solrl_ray.config.rewards import Remote, RewardConfig
from solrl_ray.errors import RewardError, UserError
from solrl_ray.records import SampleShape
from solrl_ray.rewards import endpoint
from tests.support.http_server import Quiet, listening
from tests.support.proxy import proxying

PROMPTS = ["a red square", "two blue circles"]
Answer = tuple[int, bytes]
LATER = datetime.now(UTC) + timedelta(days=1)


def images() -> torch.Tensor:
    return torch.rand(2, 3, 5, 7, generator=torch.Generator().manual_seed(0))


def config(url: str, **settings: Any) -> RewardConfig:
    return RewardConfig(kind="remote", remote=Remote(url=url, **settings))


def score(url: str, **settings: Any) -> torch.Tensor:
    return rewards.load([config(url, **settings)], "cpu").score(images(), PROMPTS)


class Seen:
    """What a server was sent, and the answers that it gives in turn; the last one is repeated."""

    def __init__(self, answers: list[Answer]) -> None:
        self.answers = answers
        self.requests: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.url = ""
        self.connections: set[tuple[str, int]] = set()
        self.times: list[float] = []
        self.headers: dict[str, str] = {}
        """Further ones of each answer."""
        self.release = threading.Event()
        """Lets a server that hangs go on."""


def slowly(seen: Seen, file: BufferedIOBase, content: bytes) -> None:
    with suppress(OSError):
        for byte in content:
            file.write(bytes([byte]))
            seen.release.wait(0.05)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Seen]]:
    monkeypatch.setattr(endpoint, "PAUSE", 0.01)
    monkeypatch.setattr(Quiet, "protocol_version", "HTTP/1.1")  # which keeps connections
    servers, made = ExitStack(), list[Seen]()

    def start(*answers: Answer, hang: bool = False, drip: bool = False, headers: bool = False) -> Seen:
        seen = Seen(list(answers))

        class Handler(Quiet):
            def do_POST(self) -> None:
                body = json.loads(self.read())
                status, answer = seen.answers[min(len(seen.requests), len(seen.answers) - 1)]
                seen.requests.append((body, dict(self.headers)))
                seen.times.append(time.monotonic())
                seen.connections.add(self.client_address)
                if hang:
                    seen.release.wait(30)
                    return
                if headers:
                    slowly(seen, self.wfile, b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 3)
                if drip:
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer))
                    slowly(seen, self.wfile, answer)
                else:
                    self.answer(answer, status, **seen.headers)

        seen.url = f"{servers.enter_context(listening(Handler))}/score"
        made.append(seen)
        return seen

    with servers:
        yield start
        for seen in made:
            seen.release.set()


GOOD = (200, b'{"scores": [0.25, -1]}')


def test_images_travel_as_png_with_their_prompts(serve: Callable[..., Seen]) -> None:
    seen = serve(GOOD)
    assert score(seen.url).tolist() == [0.25, -1.0]
    ((body, headers),) = seen.requests
    pictures = np.stack([np.asarray(Image.open(io.BytesIO(base64.b64decode(png)))) for png in body["images"]])
    assert np.array_equal(pictures, (images() * 255).round().byte().permute(0, 2, 3, 1).numpy())
    assert body["prompts"] == PROMPTS
    assert headers["X-Request-Id"] == body["request"]
    assert "Authorization" not in headers


def test_a_busy_server_is_asked_again_under_the_same_id(serve: Callable[..., Seen]) -> None:
    seen = serve((503, b"loading"), (429, b"slow down"), GOOD)
    assert score(seen.url, retries=2).tolist() == [0.25, -1.0]
    assert len({body["request"] for body, _ in seen.requests}) == 1
    assert len(seen.requests) == 3


def test_a_server_that_stays_broken_ends_the_run_with_its_words(serve: Callable[..., Seen]) -> None:
    seen = serve((500, b"CUDA out of\nmemory"))
    with pytest.raises(RewardError, match=r"^Reward rewards\[0\] \(remote\) .* 2 attempts .*500"):
        score(seen.url, retries=1)
    with pytest.raises(RewardError, match="CUDA out of memory"):
        score(seen.url, retries=0)


def test_a_refusal_is_not_repeated(serve: Callable[..., Seen]) -> None:
    seen = serve((401, b"no such token"))
    with pytest.raises(RewardError, match=r"refused by http.*401 Unauthorized: no such token"):
        score(seen.url)
    assert len(seen.requests) == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b'{"scores": [1.0]}', "expected 2 numbers"),
        (b'{"scores": [1.0, null]}', "expected 2 numbers"),
        (b'{"scores": [true, 0.5]}', "expected 2 numbers"),
        (b'{"scores": [1.0, NaN]}', "returned nan for 1 of 2 images, first for the prompt 'two blue circles'"),
        (b'{"rewards": [1.0, 2.0]}', 'expected {"scores"'),
        (b"Hello", "got 'Hello'"),
        (b'{"scores": [1e999, 1.0]}', "returned inf for 1 of 2 images"),
        (b'{"scores": [1.0, ' + b"9" * 400 + b"]}", "expected 2 numbers"),
        (b'{"scores": [1.0, ' + b"9" * 6000 + b"]}", 'expected {"scores"'),
        (b'{"scores": ' + b"[" * 100_000, 'expected {"scores"'),
    ],
)
def test_an_answer_that_is_not_a_finite_number_an_image_is_refused(
    serve: Callable[..., Seen], answer: bytes, message: str
) -> None:
    seen = serve((200, answer))
    with pytest.raises(RewardError, match=message):
        score(seen.url)
    assert len(seen.requests) == 1


def test_a_server_that_redirects_does_not_pass_pictures_and_token_on(
    serve: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    other, seen = serve(GOOD), serve((307, b""))
    seen.headers["Location"] = other.url
    monkeypatch.setenv("KEY", "s3cret")
    with pytest.raises(RewardError, match=r"refused by .*307"):
        score(seen.url, token_variable="KEY")
    assert (len(seen.requests), other.requests) == (1, [])


def test_an_answer_that_does_not_end_is_given_up(serve: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_ANSWER", 1000)
    seen = serve((200, b" " * 1000 + GOOD[1]))
    with pytest.raises(RewardError, match="more than 1000 bytes"):
        score(seen.url, retries=0)


@pytest.mark.parametrize("behaviour", ["hang", "drip", "headers"])
def test_a_server_that_is_too_slow_is_given_up(serve: Callable[..., Seen], behaviour: str) -> None:
    seen = serve((200, b" " * 400 + GOOD[1]), **{behaviour: True})
    with pytest.raises(RewardError, match=r"2 attempts of at most 0\.2 s.*TimeoutError"):
        score(seen.url, retries=1, timeout=0.2)
    assert len(seen.requests) == 2


def test_all_requests_of_a_process_share_a_connection(serve: Callable[..., Seen]) -> None:
    seen = serve(GOOD)
    for _ in range(3):
        score(seen.url)
    assert (len(seen.requests), len(seen.connections)) == (3, 1)


@pytest.mark.parametrize(
    ("asked", "timeout", "waited"),
    [("1", 10.0, 1.0), ("9" * 6000, 0.3, 0.3), ("soon", 10.0, 0.01), (format_datetime(LATER, usegmt=True), 0.3, 0.3)],
    ids=["one second", "too long a number", "no number", "a date"],  # the date is another one for each process
)
def test_the_time_in_retry_after_is_waited_for_at_most_the_timeout(
    serve: Callable[..., Seen], asked: str, timeout: float, waited: float
) -> None:
    seen = serve((429, b"slow down"), GOOD)
    seen.headers["Retry-After"] = asked
    score(seen.url, timeout=timeout)
    first, second = seen.times
    assert waited <= second - first < waited + 0.8


def test_a_token_comes_from_the_environment(serve: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = serve(GOOD)
    with pytest.raises(UserError, match=r"^rewards\[0\]\.remote\.token_variable is 'MY_TOKEN'"):
        score(seen.url, token_variable="MY_TOKEN")
    monkeypatch.setenv("MY_TOKEN", "s3cret")
    score(seen.url, token_variable="MY_TOKEN")
    assert seen.requests[0][1]["Authorization"] == "Bearer s3cret"
    monkeypatch.setenv("MY_TOKEN", "s3cret\n")  # as of a secret that was made from a file
    score(seen.url, token_variable="MY_TOKEN")
    assert seen.requests[1][1]["Authorization"] == "Bearer s3cret"
    for wrong in ("“s3cret”", "s3\ncret", "s3 cret"):
        monkeypatch.setenv("MY_TOKEN", wrong)
        with pytest.raises(UserError, match=r"^MY_TOKEN holds the character ") as refused:
            rewards.check([config(seen.url, token_variable="MY_TOKEN")], [SampleShape(5, 5)], str)
        assert "cret" not in str(refused.value)


@pytest.fixture
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "ALL_PROXY"])
def test_a_server_that_only_a_proxy_knows_is_asked_by_it(
    serve: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch, no_proxies: None, variable: str
) -> None:
    seen, url = serve(GOOD), "http://rewards.internal/score"
    with proxying({"rewards.internal": urlsplit(seen.url).netloc}) as (proxy, asked):
        monkeypatch.setenv(variable, proxy.replace("//", "//me:secret@"))
        rewards.check([config(url)], [SampleShape(5, 5)], str)
        by_proxy = score(url)
        assert asked == [f"POST {url} Basic bWU6c2VjcmV0"]  # me:secret
        assert "Proxy-Authorization" not in seen.requests[0][1]
        assert score(seen.url).equal(by_proxy)  # of this machine itself
        assert len(asked) == 1
        monkeypatch.setenv("NO_PROXY", "rewards.internal")
        assert endpoint.proxy_of(url) is None


def test_a_plan_sends_nothing(serve: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cret")
    seen, notes = serve(GOOD), list[Exception]()
    judge = {
        "url": seen.url,
        "model": "m",
        "question": {"text": "From 0 to 10: {prompt}?"},
        "token_variable": "MY_TOKEN",
    }
    entries = [
        config(seen.url, token_variable="MY_TOKEN"),
        RewardConfig.model_validate({"kind": "judge", "judge": judge}),
    ]
    rewards.check(entries, [SampleShape(5, 5)], str, tell=notes.append)
    assert (seen.requests, notes) == ([], [])


def test_a_proxy_that_refuses_or_cannot_be_used_is_named_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, no_proxies: None
) -> None:
    url = "https://rewards.internal/score"
    with proxying({}) as (proxy, asked):
        monkeypatch.setenv("HTTPS_PROXY", proxy.replace("//", "//me:secret@"))
        with pytest.raises(RewardError, match="403") as refused:
            score(url, retries=0)
        assert asked == ["CONNECT rewards.internal:443"]
        assert "secret" not in str(refused.value)
    with pytest.raises(UserError, match=r"its proxy 127\.0\.0\.1:\d+ does not answer: .* HTTPS_PROXY") as silent:
        rewards.check([config(url)], [SampleShape(5, 5)], str)
    assert "secret" not in str(silent.value)
    for variable, proxy in (("HTTPS_PROXY", "socks5://me:secret@127.0.0.1:1080"), ("ALL_PROXY", "http://127.0.0.1:x")):
        monkeypatch.delenv("HTTPS_PROXY")
        monkeypatch.setenv(variable, proxy)
        with pytest.raises(UserError, match=rf"^{variable} is .*127\.0\.0\.1:.* to an HTTP proxy") as unusable:
            rewards.check([config(url)], [SampleShape(5, 5)], str)
        assert "secret" not in str(unusable.value)
        monkeypatch.setenv("HTTPS_PROXY", "")


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://host/score", "http://", "http://u:p@host/", "http://h:x/"]
)
def test_an_address_that_cannot_be_right_is_refused(url: str) -> None:
    with pytest.raises(UserError, match=rf"^rewards\.0\.remote\.url is {re.escape(repr(url))}"):
        rewards.check([config(url)], [SampleShape(5, 5)], str)


def test_a_server_that_is_not_there_is_missed_before_the_run() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/score"
        with pytest.raises(UserError, match=rf"^rewards\.0\.remote\.url is '{url}'"):
            rewards.check([config(url)], [SampleShape(5, 5)], str)
