"""Checks that take a second, before anything is imported, printed or started.

Prompt files that are missing or too short, folders that must exist or be writable, an address without a server, a
refused token, GPUs that this machine lacks, packages that are not installed, files that a submitted job would not have.
"""

from __future__ import annotations

import http.client
import importlib.util
import ipaddress
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from solrl_ray.common import own_code, ray_auth
from solrl_ray.common.deadlines import in_time
from solrl_ray.common.files import READ_SECONDS, lacks_space, located, refuses_files
from solrl_ray.config.contradictions import value_of
from solrl_ray.config.loading import LoadedConfig
from solrl_ray.config.own_functions import of as own_functions
from solrl_ray.config.pools import key_of, pools
from solrl_ray.errors import RunError, UserError

KNOCK_SECONDS = 1.5
ANSWER_SECONDS = 10.0
"""A busy head may answer late. `KNOCK_SECONDS` limits only the connection."""
NOT_UPLOADED = ("runs", ".venv", ".git")
"""What a submitted job does not get of the present folder."""


def check(loaded: LoadedConfig, *, address: str | None, resumes: bool) -> None:
    """Refuse a run that cannot begin here.

    Args:
        address: of the Ray cluster to join; None: a local Ray will be started.
        resumes: the run folder exists and is continued.

    Raises UserError, or RunError if nothing answers at `address` or the disk hangs.
    """
    if address:
        cluster(address)
    else:
        _gpus(loaded)
    _trackers(loaded)
    from solrl_ray.cli.outline import checked_prompts

    in_time(lambda: checked_prompts(loaded.config, loaded.sources), what="reading the prompts", seconds=READ_SECONDS)
    init = loaded.config.run.init
    if init and not resumes and not located(init, "run.init").exists():
        raise UserError(
            f"run.init is {init!r} ({loaded.sources.of('run.init')}), which is not there; it must be a run folder, "
            "a checkpoint of one, or a LoRA file."
        )
    named = f"run.root is {loaded.config.run.root} ({loaded.sources.of('run.root')})"
    in_time(lambda: _folder(loaded, named, resumes), what=f"{named}: looking at it", seconds=READ_SECONDS)
    if resumes:
        _continued(loaded)


def cluster(address: str) -> None:
    """Raise RunError if no Ray answers at `address` or it refuses this user's token, UserError if it is a URL."""
    try:
        ray_auth.knock(address, seconds=KNOCK_SECONDS, answer_seconds=ANSWER_SECONDS)
    except (OSError, ValueError) as error:
        raise RunError(f"the Ray cluster at {address} could not be joined: {error}") from error


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
        urllib.request.urlopen(request, timeout=KNOCK_SECONDS).close()
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
    """The files that the run reads, below `folder`. Raises UserError for one that a job would not have if it gets only
    that.
    """
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
        path = value_of(loaded.config, key)
        if not path.startswith("builtin:"):
            yield key, path
    for function in own_functions(loaded.config):
        place, _ = own_code.split(function.spec, function.key)
        if own_code.names_file(place):
            yield function.key, place


def _folder(loaded: LoadedConfig, named: str, resumes: bool) -> None:
    from solrl_ray.storage.run_folder import RunFolder

    config = loaded.config
    root = located(config.run.root, "run.root").absolute()
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    reason = refuses_files(existing)
    if reason:
        raise UserError(f"{named}, but {existing} {reason}.")
    if lacking := lacks_space(root, config.checkpoints.min_free_gb):
        raise UserError(f"{named}, but {lacking}.")
    if not resumes:
        RunFolder.of(config).check_new(config)


def _continued(loaded: LoadedConfig) -> None:
    """Refuse a run folder that cannot be resumed as it is."""
    from solrl_ray.storage.resume import check_readable
    from solrl_ray.storage.run_folder import RESUME_PATIENCE, RunFolder

    folder = RunFolder.of(loaded.config)
    if folder.lock.held:
        print(f"note: another process works in {folder.path}; waiting {RESUME_PATIENCE:g} s for its end", flush=True)
        folder.lock.take(seconds=RESUME_PATIENCE)
        folder.lock.release()
    in_time(lambda: check_readable(folder, loaded.config), what=f"reading {folder.path}", seconds=READ_SECONDS)


def _trackers(loaded: LoadedConfig) -> None:
    """Refuse trackers whose packages are not installed."""
    for name in loaded.config.tracking.trackers:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"tracking.trackers has {name} ({loaded.sources.of('tracking.trackers')}), whose package is not "
                f"installed; pip install {name}, which is also this package's extra {name}."
            )


def _gpus(loaded: LoadedConfig) -> None:
    """Refuse workers with GPUs if a local Ray would find none."""
    ray, config = sys.modules.get("ray"), loaded.config
    if _has_gpus() or (ray is not None and ray.is_initialized()):
        return
    workers = {key_of(config.fleet, name): pool for name, pool in pools(config.fleet).items()}
    workers["fleet.learners"] = config.fleet.learners  # type: ignore[assignment]
    asking = [f"{key}.num_gpus" for key, worker in workers.items() if worker.num_gpus]
    if asking:
        raise UserError(
            f"{asking[0]} is {value_of(config, asking[0]):g} ({loaded.sources.of(asking[0])}), but this machine has no "
            "GPU; run it on one that has, or name a cluster with --address (the demo's model trains on CPUs without a "
            "clusters part; `solrl plan` needs no GPU)."
        )


def _has_gpus() -> bool:
    if os.environ.get("CUDA_VISIBLE_DEVICES", "unset").strip() in ("", "-1"):
        return False
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists() or Path("/dev/kfd").exists()
