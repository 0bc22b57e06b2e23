"""A small HTTP proxy, which knows the names of servers on loopback that nobody else knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection
from urllib.parse import urlsplit

from tests.support.http_server import Quiet, listening


@contextmanager
def proxying(names: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Its address, and the requests that it gets: a method and an address each. `names`: host → ``127.0.0.1:port``.

    Plain requests go on to their host; tunnels are refused.
    """
    asked: list[str] = []

    class Proxy(Quiet):
        def do_POST(self) -> None:
            asked.append(f"{self.command} {self.path} {self.headers.get('Proxy-Authorization', '')}".strip())
            to = urlsplit(self.path)
            connection = HTTPConnection(names[to.hostname or ""], timeout=60)
            headers = {name: value for name, value in self.headers.items() if not name.startswith("Proxy-")}
            connection.request("POST", to.path, self.read(), headers)
            answer = connection.getresponse()
            self.answer(answer.read(), answer.status)
            connection.close()

        def do_CONNECT(self) -> None:
            asked.append(f"{self.command} {self.path}")
            self.answer(b"", 403)

    with listening(Proxy) as address:
        yield address, asked
