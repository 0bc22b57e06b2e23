"""A stand-in for the Hugging Face hub on loopback: what `solrl push` needs of its HTTP interface.

One user owns the names below ``me/``. Large files come by LFS's basic transfer, as to a hub without Xet.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.http_server import Quiet, listening

TOKEN = "hf_right"
OWNER = "me"


@dataclass
class Repository:
    private: bool = False
    locked: bool = False
    """Nobody may look at it."""
    card: dict[str, Any] = field(default_factory=dict)
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    """Branch → file → content."""


@dataclass
class Hub:
    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    lfs: dict[str, bytes] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)
    """Which were shown."""


class Refusal(Exception):
    def __init__(self, status: int, said: str, code: str = "", **more: str) -> None:
        super().__init__(said)
        self.status, self.code, self.values = status, code, {"error": said, **more}


def answer(hub: Hub, method: str, path: str, body: bytes) -> dict[str, Any]:
    """What a request is answered that shows the right token. Raises Refusal."""
    if method == "PUT" and path.startswith("/lfs/"):
        hub.lfs[path.removeprefix("/lfs/")] = body
        return {}
    if path == "/api/repos/create":
        return _create(hub, json.loads(body))
    if path == "/api/validate-yaml":
        return {"errors": [], "warnings": []}
    if re.fullmatch(r"/(\w+/[\w.-]+)\.git/info/lfs/objects/batch", path):
        objects = [
            {**each, "authenticated": True, "actions": {"upload": {"href": f"{hub.url}/lfs/{each['oid']}"}}}
            for each in json.loads(body)["objects"]
        ]
        return {"transfer": "basic", "objects": objects}
    return _about_model(hub, path, body)


def _about_model(hub: Hub, path: str, body: bytes) -> dict[str, Any]:
    found = re.fullmatch(r"/api/models/([\w-]+/[\w.-]+)(?:/(\w+)/([\w.-]+))?", path)
    if not found:
        raise Refusal(404, f"no such path: {path}")
    name, action, revision = found.groups()
    if name not in hub.repositories:
        raise Refusal(404, "Repository not found", "RepoNotFound")
    repository = hub.repositories[name]
    if repository.locked:
        raise Refusal(403, f"You have no access to {name}")
    if action is None:
        return {"id": name, "private": repository.private, "cardData": repository.card, "siblings": [], "tags": []}
    if not name.startswith(f"{OWNER}/"):
        raise Refusal(403, f"You have no access to {name}")
    if action == "branch":
        if revision in repository.branches:
            raise Refusal(409, "Reference already exists")
        repository.branches[revision] = dict(repository.branches["main"])
        return {}
    if revision not in repository.branches:
        raise Refusal(404, f"no branch {revision}", "RevisionNotFound")
    if action == "preupload":
        modes = {True: "lfs", False: "regular"}
        paths = [each["path"] for each in json.loads(body)["files"]]
        return {
            "files": [
                {"path": each, "uploadMode": modes[each.endswith(".safetensors")], "shouldIgnore": False}
                for each in paths
            ]
        }
    return _commit(hub, name, revision, [json.loads(line) for line in body.splitlines()])


def _create(hub: Hub, asked: dict[str, Any]) -> dict[str, Any]:
    name = f"{asked['organization']}/{asked['name']}"
    if asked["organization"] != OWNER:
        raise Refusal(
            403, f'You don\'t have the rights to create a model under the namespace "{asked["organization"]}"'
        )
    if name in hub.repositories:
        raise Refusal(409, "You already created this model repo", url=f"{hub.url}/{name}")
    hub.repositories[name] = Repository(private=asked.get("visibility") == "private")
    return {"url": f"{hub.url}/{name}", "name": name}


def _commit(hub: Hub, name: str, revision: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    files = hub.repositories[name].branches[revision]
    for line in lines:
        value = line["value"]
        if line["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif line["key"] == "lfsFile":
            files[value["path"]] = hub.lfs[value["oid"]]
    number = "1" * 40
    return {"commitUrl": f"{hub.url}/{name}/commit/{number}", "commitOid": number, "success": True}


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()

    class Handler(Quiet):
        def _any(self) -> None:
            body = self.read()
            shown = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            try:
                # The address of a large file is a secret itself; the others are public, and asked by the hub's library.
                if not self.path.startswith(("/lfs/", "/api/validate-yaml", "/api/agent-harnesses")):
                    hub.tokens.add(shown)
                    if shown != TOKEN:
                        raise Refusal(401, "Invalid credentials in Authorization header")
                status, values, headers = 200, answer(hub, self.command, self.path.partition("?")[0], body), {}
            except Refusal as refusal:
                status, values = refusal.status, refusal.values
                headers = {"X_Error_Message": values["error"]}
                if refusal.code:
                    headers["X_Error_Code"] = refusal.code
            self.answer(json.dumps(values).encode(), status, Content_Type="application/json", **headers)

        do_GET = do_POST = do_PUT = _any

    with listening(Handler) as url:
        hub.url = url
        yield hub
