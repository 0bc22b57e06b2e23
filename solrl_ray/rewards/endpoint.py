"""HTTP requests to a scoring server, for `remote` and `judge`: retries while it is busy, deadlines, costs."""

from __future__ import annotations

import asyncio
import atexit
import base64
import io
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from ipaddress import ip_address
from typing import TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import torch
from PIL import Image
from torch import Tensor
from yarl import URL

from solrl_ray.common.tokens import check_token
from solrl_ray.errors import RewardError, SilentServer, UserError
from solrl_ray.rewards.preprocessing import eight_bits

PAUSE = 0.5
"""Pause before the first retry, seconds; doubled before each further one."""
MAX_ANSWER = 4 * 2**20
"""Largest answer, bytes; a score takes about 20."""
IDLE = 4.0
"""Time for which an idle connection is kept, seconds; servers close theirs after 5 or more."""
CONNECT_CHECK = 5.0
"""Time limit of the server check before a run, seconds."""

T = TypeVar("T")


class TryAgain(Exception):
    """A failure that may be temporary: no connection, a timeout, a busy or failing server, or no score in an answer."""

    def __init__(self, message: str, status: int = 0, seconds: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status of the answer; 0: there was no answer."""
        self.seconds = seconds
        """The pause that the server asks for."""


class FailedRequest(RewardError):
    """No attempt gave a usable answer."""

    def __init__(self, message: str, status: int = 0, words: str = "") -> None:
        super().__init__(message)
        self.status = status
        """HTTP status of the last answer; 0: there was no answer."""
        self.words = words
        """Status, reason and the server's message."""


class RefusedRequest(FailedRequest):
    """The server refused the request; a repetition would be refused, too."""


class Endpoint:
    """Posts JSON over persistent connections. Thread-safe.

    A request is repeated if the server cannot be reached, times out, or answers 429 or 5xx (not before the time in
    Retry-After), or if the caller cannot read the answer. Any other failure ends the run with the server's message: a
    failed reward is never replaced by a number.
    """

    def __init__(self, name: str, url: str, *, token: str, timeout: float, retries: int) -> None:
        """
        Args:
            name: name of the reward, for messages.
            timeout: time limit of an attempt, from connecting to the last byte, and of a pause; seconds.
            retries: number of further attempts after a failure that may be temporary.
        """
        self._name, self._url, self._token = name, url, token
        self._proxy, self._to_proxy = proxy_of(url), dict[str, str]()
        if self._proxy and self._proxy.user:
            login = base64.b64encode(f"{self._proxy.user}:{self._proxy.password or ''}".encode()).decode()
            self._proxy, self._to_proxy = self._proxy.with_user(None), {"Proxy-Authorization": f"Basic {login}"}
        self._timeout, self._attempts = timeout, retries + 1
        self._loop, self._session = _shared()
        self._lock = threading.Lock()
        self._counted: Counter[str] = Counter()

    def ask(self, body: bytes, identity: str, read: Callable[[bytes], T]) -> T:
        """Send a request; returns the result of `read` for its answer.

        Args:
            identity: id of the request, the same in all attempts.
            read: converts the answer; it may raise `TryAgain` to repeat the request.

        Raises:
            FailedRequest: no attempt gave a usable answer.
            RefusedRequest: the server refused the request.
        """
        for attempt in range(self._attempts):
            self.count(requests=1, retries=int(attempt > 0))
            try:
                return read(asyncio.run_coroutine_threadsafe(self._post(body, identity), self._loop).result())
            except TryAgain as error:
                if attempt + 1 == self._attempts:
                    raise FailedRequest(
                        f"Reward {self._name} got no scores from {self._url} in {self._attempts} attempts of at most "
                        f"{self._timeout:g} s; the last one: {error}.",
                        error.status,
                    ) from error
                time.sleep(max(PAUSE * 2**attempt, min(error.seconds, self._timeout)))
        raise AssertionError("unreachable")

    def count(self, **more: int) -> None:
        """Add to the costs."""
        with self._lock:
            self._counted.update(more)

    def take_costs(self) -> dict[str, int]:
        """Costs since the last call: ``requests`` (which include ``retries``), and everything added by `count`."""
        with self._lock:
            counted, self._counted = self._counted, Counter()
        return {name: count for name, count in counted.items() if count}

    async def _post(self, body: bytes, identity: str) -> bytes:
        """Post once; returns the body of the answer. Raises TryAgain or RefusedRequest."""
        headers = {"Content-Type": "application/json", "X-Request-Id": identity}
        if self._url.startswith("http:"):
            headers |= self._to_proxy
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        post = self._session.post(
            self._url,
            data=body,
            headers=headers,
            allow_redirects=False,
            proxy=self._proxy,
            proxy_headers=self._to_proxy,
        )
        answer = bytearray()
        try:
            async with asyncio.timeout(self._timeout), post as response:
                async for part in response.content.iter_any():
                    answer += part
                    if len(answer) > MAX_ANSWER:
                        raise TryAgain(f"an answer of more than {MAX_ANSWER} bytes")
        except (OSError, aiohttp.ClientError) as error:
            raise TryAgain(f"{type(error).__name__} {error}".strip()) from error
        if response.status == 200:
            return bytes(answer)
        words = f"{response.status} {response.reason}: {' '.join(answer.decode(errors='replace').split())[:500]}"
        if response.status == 429 or response.status >= 500:
            raise TryAgain(words, response.status, _seconds(response.headers.get("Retry-After", "")))
        message = f"Reward {self._name} was refused by {self._url}: {words}."
        raise RefusedRequest(message, response.status, words)


@cache
def _shared() -> tuple[asyncio.AbstractEventLoop, aiohttp.ClientSession]:
    """The event loop of this process's connections, which runs in a separate thread, and their session."""

    async def opened() -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE)
        return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="reward servers", daemon=True).start()
    session = asyncio.run_coroutine_threadsafe(opened(), loop).result()
    atexit.register(lambda: asyncio.run_coroutine_threadsafe(session.close(), loop).result(1.0))
    return loop, session


def _seconds(retry_after: str) -> float:
    """The pause in a Retry-After header, given as seconds or as a date; 0 if it is neither."""
    try:
        if retry_after.isdecimal():
            return float(retry_after)
        return (parsedate_to_datetime(retry_after) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError):  # TypeError: a date without its zone
        return 0.0


def check_url(url: str, key: str, example: str) -> None:
    """Raise UserError if `url` is not a valid HTTP address, or has a password."""
    try:
        parts = urlsplit(url)
        usable = (
            parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
        )
    except ValueError:
        usable = False
    if not usable:
        raise UserError(f"{key} is {url!r}; it must be an address such as {example!r}, without a password in it.")


def proxy_of(url: str) -> URL | None:
    """The proxy for `url`, from HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY; None if it needs none.

    Raises UserError if it is not an HTTP proxy.
    """
    target, proxies = URL(url), getproxies()
    given = proxies.get(target.scheme) or proxies.get("all", "")
    if not given or _is_loopback(target.host or "") or proxy_bypass(f"{target.host}:{target.port}"):
        return None
    with suppress(ValueError):
        proxy = URL(given if "://" in given else f"http://{given}")
        if proxy.scheme in ("http", "https") and proxy.host:
            return proxy
    variable = f"{target.scheme.upper() if target.scheme in proxies else 'ALL'}_PROXY"
    raise UserError(
        f"{variable} is {given.rpartition('@')[2]!r}, through which {url} cannot be reached; set it to an HTTP proxy, "
        f"such as http://proxy:3128, or name {target.host} in NO_PROXY."
    )


def _is_loopback(host: str) -> bool:
    """True for this machine itself, which no proxy of a company's network can reach."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def check_reachable(url: str, key: str, timeout: float, advice: str) -> None:
    """Raise SilentServer if nothing listens at `url`, or at its proxy. `advice` ends the message."""
    proxy = proxy_of(url)
    target, what = proxy or URL(url), "nothing answers there"
    if proxy:
        what = f"its proxy {proxy.host}:{proxy.port} does not answer"
        advice = f"set HTTPS_PROXY, HTTP_PROXY or ALL_PROXY to another, or name {URL(url).host} in NO_PROXY"
    try:
        socket.create_connection((target.host or "", target.port or 0), min(timeout, CONNECT_CHECK)).close()
    except OSError as error:
        raise SilentServer(f"{key} is {url!r}, but {what}: {error}; {advice}.") from error


def token_of(variable: str, key: str) -> str:
    """The value of an environment variable; empty if none is named. Raises UserError if it is unset or not a token."""
    token = os.environ.get(variable, "").strip() if variable else ""
    if variable and not token:
        raise UserError(
            f"{key} is {variable!r}, but that environment variable is not set; set it to the server's token."
        )
    check_token(token, variable)
    return token


def png(image: Tensor) -> str:
    """An image, uint8 [3, H, W], as a PNG file in base64."""
    file = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(file, "PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode("ascii")


def references_shown(references: Tensor | None, count: int) -> list[list[str]]:
    """The reference images [B, n, 3, H, W] of each prompt, encoded by `png`; images shared by a batch only once.

    Raises RewardError if there are none.
    """
    if references is None:
        raise RewardError("A reward that shows reference images got prompts that have none.")
    rows = references[:1] if references.stride(0) == 0 else references
    shown = [[png(image) for image in eight_bits(row).to("cpu", torch.uint8)] for row in rows]
    return shown * (count // len(shown))
