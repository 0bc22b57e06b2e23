"""The configuration of a command, for a new, a resumed or a forked run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from solrl_ray.common.deadlines import in_time
from solrl_ray.common.files import READ_SECONDS, located
from solrl_ray.config import own_functions, strategies
from solrl_ray.config.loading import LoadedConfig, load_with_sources
from solrl_ray.config.schema import Config
from solrl_ray.errors import UserError
from solrl_ray.storage import continuation


def fresh(arguments: argparse.Namespace) -> LoadedConfig:
    """The configuration of a new run from CONFIG, --set and --from, with the source files of the user's functions."""
    loaded = _given(arguments)
    if loaded is None:
        raise UserError("No configuration was given; name at least one, such as demo. `solrl list` shows the presets.")
    config = own_functions.attached(loaded.config, loaded.sources)
    init: str = getattr(arguments, "init", "")
    if init and (run := continuation.origin(Path(init))):
        own_functions.check_owner(config, run, loaded.sources)
    return replace(loaded, config=config)


def _given(arguments: argparse.Namespace) -> LoadedConfig | None:
    """The configuration of CONFIG, --set and --from; None if neither CONFIG nor --from is given."""
    files, options = arguments.config, dict[str, tuple[str, str]]()
    init: str = getattr(arguments, "init", "")
    if init:
        run = continuation.origin(Path(init))
        if not files and run is None:
            raise UserError(
                f"--from {init} is neither a run folder nor a checkpoint of a run; for a LoRA file, name CONFIG, too."
            )
        files = files or [Path(run or "") / continuation.FILE]
        options = {"run.init": ("--from", init), "run.init_digest": ("--from", "")}
    return load_with_sources(files, arguments.set, options) if files else None


def begun(arguments: argparse.Namespace) -> bool:
    """Whether the run folder of the configuration already contains a run."""
    from solrl_ray.storage.run_folder import RunFolder

    folder = RunFolder.of(fresh(arguments).config)
    return in_time(lambda: folder.begun, what=f"looking at {folder.path}", seconds=READ_SECONDS)


def resumed(arguments: argparse.Namespace) -> LoadedConfig:
    """The configuration of a resumed run: that of the run folder, or the given one if it agrees with the run's."""
    if arguments.resume:
        if getattr(arguments, "init", ""):
            raise UserError(
                f"--from is {arguments.init}, but --resume continues the policy of {arguments.resume}; leave out one."
            )
        return resume_folder(located(arguments.resume, "--resume"), arguments.config, arguments.set)
    given = _given(arguments)
    if given is None:
        raise UserError("--resume needs a run folder or the run's configuration files.")
    return _continued(given, located(given.config.run.root, "run.root") / given.config.run.name)


def resume_folder(
    folder: Path, files: Sequence[Path], overrides: Sequence[str], options: Mapping[str, tuple[str, Any]] | None = None
) -> LoadedConfig:
    """The configuration of a resumed run: `files` if given, else the run's configuration; see `load_with_sources`."""
    location = _location(folder, continuation.stored(folder))
    return _continued(
        load_with_sources(files or [folder / continuation.FILE], overrides, location | dict(options or {})), folder
    )


def _continued(loaded: LoadedConfig, folder: Path) -> LoadedConfig:
    was = continuation.stored(folder)
    config = continuation.inherit_from(loaded.config, was)
    loaded = replace(loaded, config=own_functions.attached(config, loaded.sources, resumed=folder))
    continuation.check(loaded.config, was, folder, loaded.sources)
    changed = own_functions.changes(loaded.config, folder, "the run continues with its copy")
    for note in [*continuation.notes(loaded.config, was), *changed]:
        print(f"note: {note}", file=sys.stderr)
    return loaded


def _location(folder: Path, was: Config) -> dict[str, tuple[str, str]]:
    """`run.root` and `run.name` of a resumed run: the stored values; the folder's current path if the folder was moved
    or the process has another working directory.
    """
    current, root = folder.absolute(), was.run.root
    if (located(root, "run.root") / was.run.name).absolute() != current:
        root = str(current.parent)
    return {"run.root": ("--resume", root), "run.name": ("--resume", current.name)}


def check_tier(loaded: LoadedConfig, gpu: str, fastest: str) -> None:
    """Raise UserError if the GPU, whose fastest tier is `fastest`, cannot compute the previews."""
    tier = strategies.pool_sampling(loaded.config).tier
    if tier not in ("nvfp4", "fp8") or tier == fastest or fastest == "nvfp4":
        return
    raise UserError(
        f"rollout.explore.precision is {tier} ({loaded.sources.of('rollout.explore.precision')}), which {gpu} cannot "
        f"compute; set it to auto."
    )


def on_card(config: Config, fastest: str) -> Config:
    """The configuration with ``rollout.explore.precision: auto`` resolved for a GPU whose fastest tier is `fastest`."""
    if config.rollout.explore.precision != "auto":
        return config
    tier = strategies.full_tier(config.model) if fastest in strategies.UNQUANTIZED_TIERS else fastest
    return config.changed({"rollout.explore.precision": tier})
