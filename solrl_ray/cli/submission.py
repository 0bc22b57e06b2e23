"""Whether the Job server answers ``solrl submit``, and whether the folder that it uploads has what a run reads."""

from __future__ import annotations

import http.client
import ipaddress
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from solrl_ray.common import own_code, ray_auth
from solrl_ray.common.files import located
from solrl_ray.config import named
from solrl_ray.config.loading import LoadedConfig
from solrl_ray.config.own_functions import of as own_functions
from solrl_ray.errors import RunError, UserError

ANSWER_SECONDS = 1.5
NOT_UPLOADED = ("runs", ".venv", ".git")
"""What a submitted job does not get of the present folder."""


def job_server(url: str) -> None:
    """Raise RunError if no Job server answers at `url`, or it refuses this user's token; UserError if it is no URL."""
    if not url.startswith(("http://", "https://")):
        raise UserError(f"--address is {url!r}; it must be the dashboard's address, such as http://head:8265.")
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/api/version")
        for name, value in ray_auth.headers().items():
            if url.startswith("http://") and not _is_here(urllib.parse.urlsplit(url).hostname or ""):
                print(f"warning: the token goes unencrypted to {url}; a tunnel or https:// hides it", file=sys.stderr)
            request.add_unredirected_header(name, value)  # a server may redirect to any other
        urllib.request.urlopen(request, timeout=ANSWER_SECONDS).close()
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise RunError(f"the Job server at {url} cannot be used: {ray_auth.refusal()}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise RunError(f"the Job server at {url} cannot be used: {reason or type(error).__name__}") from error


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def upload(loaded: LoadedConfig, folder: Path) -> list[str]:
    """The files that the run reads, below `folder`. Raises UserError for one that a job with only that would lack."""
    inside_it = []
    for key, path in _files(loaded):
        place = located(path, key)
        inside = (folder / place).resolve()
        named = f"{key} is {path!r} ({loaded.sources.of(key)})"
        if place.is_absolute():
            if key.startswith("prompts."):
                continue  # on a disk of the cluster
            raise UserError(f"{named}; a submitted job has {folder} and not this machine: name it relative to that.")
        if not inside.is_relative_to(folder) or inside.relative_to(folder).parts[0] in NOT_UPLOADED:
            raise UserError(f"{named}, which is not in what a submitted job is given: {folder} without runs and .venv.")
        if not inside.exists():
            raise UserError(f"{named}, but there is no {inside}.")
        inside_it.append(str(place))
    return inside_it


def _files(loaded: LoadedConfig) -> Iterator[tuple[str, str]]:
    for key in ("prompts.train", "prompts.heldout"):
        path = loaded.config.value_of(key)
        if not path.startswith("builtin:"):
            yield key, path
    for function in own_functions(loaded.config):
        place, _ = own_code.split(function.spec, function.key)
        if own_code.names_file(place):
            yield function.key, place


def configuration_file(path: Path, folder: Path) -> str:
    """`path` as the job will see it."""
    place = path.resolve()
    if place.is_relative_to(folder) and place.relative_to(folder).parts[0] not in NOT_UPLOADED:
        return str(place.relative_to(folder))
    if name := named.as_argument(path):
        return name
    raise UserError(
        f"The configuration file {path} is not in what the job is given: {folder} without {', '.join(NOT_UPLOADED)}."
    )
