"""What the command line asks of the system: start Ray, run a controller, show its progress."""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from actors import waiting
from actors.controller import Controller
from actors.roles import Roles
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError
from solrl_ray.report import LiveView
from solrl_ray.run_folder import RunFolder

REFRESH_SECONDS = 0.5


def train(
    config: Config,
    *,
    resume: bool = False,
    address: str | None = None,
    live: bool = True,
    roles: Roles | None = None,
) -> int:
    """Train on a running cluster (`address`) or on a local Ray started for it; returns the exit status.

    Args:
        resume: the run folder exists and is continued.
        roles: other classes for the actors, for tests and benchmarks.

    Raises:
        UserError: bad input, before any training state is touched.
        RunError: the run cannot go on; the run folder can be resumed.
    """
    folder = RunFolder.of(config)
    folder.create(config, resume=resume)
    folder.unlock()  # the controller claims it: the process that writes
    with ExitStack() as stack:
        connect(config, address)
        stack.callback(ray.shutdown)
        view = stack.enter_context(LiveView(plain=not live))
        controller = _controller(config, folder.path.absolute(), roles or Roles())
        _follow(controller, view, config)
    print(f"summary: {folder.path / 'summary.json'}\nreport:  {folder.path / 'report.html'}")
    return 0


def connect(config: Config, address: str | None) -> None:
    """Join the cluster at `address`, or start a local Ray whose dashboard and jobs ask for this user's token."""
    if ray.is_initialized():
        return
    if address is None:
        _provide_token()
    try:
        context = ray.init(
            address=address or "local",
            namespace=f"solrl-{config.run.name}",
            log_to_driver=False,
            logging_level="error",
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = f"the Ray cluster at {address} could not be joined" if address else "a local Ray did not start"
        raise RunError(f"{where}: {waiting.first_line(error)}") from error
    if context.dashboard_url:
        print(f"dashboard   http://{context.dashboard_url} (token: `ray get-auth-token`)", flush=True)


def _provide_token() -> None:
    """Make the token that Ray's tools look for, unless there is one: in token mode nothing starts without."""
    path = Path.home() / ".ray" / "auth_token"
    given = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")) or path.exists()
    if os.environ["RAY_AUTH_MODE"] == "token" and not given:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(32))


def _controller(config: Config, folder: Path, roles: Roles) -> Any:
    make = ray.remote(Controller).options(name="controller", num_cpus=0, num_gpus=0, max_restarts=0, max_concurrency=4)
    return make.remote(config, folder, roles)


def _follow(controller: Any, view: LiveView, config: Config) -> None:
    """Show progress until the run has ended; raises what ended it."""
    run = controller.run.remote()
    while True:
        try:
            ray.get(run, timeout=REFRESH_SECONDS)
            break
        except GetTimeoutError:
            pass
        except waiting.LOST as error:
            raise RunError(f"the controller is gone: {waiting.first_line(error)}; go on with --resume") from error
        except RayTaskError as error:
            raise waiting.translated(error, "the run") from error
        _show(controller, view, config)
    _show(controller, view, config)


def _show(controller: Any, view: LiveView, config: Config) -> None:
    seconds = config.fleet.deadlines.start
    view.update(waiting.get(controller.progress.remote(), what="the controller's progress", seconds=seconds))
