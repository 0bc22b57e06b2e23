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
    """The configuration of a new run: CONFIG, --set and --from, with the files of its functions."""
    loaded = _given(arguments)
    if loaded is None:
        raise UserError("No configuration was given; name at least one, such as demo; `solrl list` shows them.")
    config = own_functions.attached(loaded.config, loaded.sources)
    init: str = getattr(arguments, "init", "")
    if init and (run := continuation.origin(Path(init))):
        own_functions.check_owner(config, run, loaded.sources)
    return replace(loaded, config=config)


def _given(arguments: argparse.Namespace) -> LoadedConfig | None:
    """CONFIG, --set and --from; None without CONFIG and --from."""
    files, options = arguments.config, dict[str, tuple[str, str]]()
    init: str = getattr(arguments, "init", "")
    if init:
        run = continuation.origin(Path(init))
        if not files and run is None:
            said = f"--from {init} is no run folder and no checkpoint of one; with a LoRA file name CONFIG, too."
            raise UserError(said)
        files = files or [Path(run or "") / continuation.FILE]
        options = {"run.init": ("--from", init), "run.init_digest": ("--from", "")}
    return load_with_sources(files, arguments.set, options) if files else None


def begun(arguments: argparse.Namespace) -> bool:
    """Whether the configuration's folder holds a run."""
    from solrl_ray.storage.run_folder import RunFolder

    folder = RunFolder.of(fresh(arguments).config)
    return in_time(lambda: folder.begun, what=f"looking at {folder.path}", seconds=READ_SECONDS)


def resumed(arguments: argparse.Namespace) -> LoadedConfig:
    """The configuration to resume with: the run folder's, or the given one if both agree."""
    if arguments.resume:
        if getattr(arguments, "init", ""):
            raise UserError(f"--from is {arguments.init}, but --resume goes on with the policy of {arguments.resume}.")
        return resume_folder(located(arguments.resume, "--resume"), arguments.config, arguments.set)
    given = _given(arguments)
    if given is None:
        raise UserError("--resume needs a run folder or the run's configuration files.")
    return _continued(given, located(given.config.run.root, "run.root") / given.config.run.name)


def resume_folder(
    folder: Path, files: Sequence[Path], overrides: Sequence[str], options: Mapping[str, tuple[str, Any]] | None = None
) -> LoadedConfig:
    """The configuration to resume the run in `folder` with: its own, or `files`; see `load_with_sources`."""
    place = _place(folder, continuation.stored(folder))
    return _continued(
        load_with_sources(files or [folder / continuation.FILE], overrides, place | dict(options or {})), folder
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


def _place(folder: Path, was: Config) -> dict[str, tuple[str, str]]:
    """Root and name of a run folder that is resumed: as the run has them, unless it was moved or this process has
    another working folder. Then the folder's present path counts.
    """
    here, root = folder.absolute(), was.run.root
    if (located(root, "run.root") / was.run.name).absolute() != here:
        root = str(here.parent)
    return {"run.root": ("--resume", root), "run.name": ("--resume", here.name)}


def check_tier(loaded: LoadedConfig, gpu: str, fastest: str) -> None:
    """Raise UserError if this card, whose fastest tier is `fastest`, cannot compute the previews."""
    tier = strategies.pool_sampling(loaded.config).tier
    if tier not in ("nvfp4", "fp8") or tier == fastest or fastest == "nvfp4":
        return
    raise UserError(
        f"rollout.explore.precision is {tier} ({loaded.sources.of('rollout.explore.precision')}), which {gpu} cannot "
        f"compute; set it to auto."
    )


def on_card(config: Config, fastest: str) -> Config:
    """The configuration with ``rollout.explore.precision: auto`` replaced for a card whose best tier is `fastest`."""
    if config.rollout.explore.precision != "auto":
        return config
    tier = strategies.full_tier(config.model) if fastest in strategies.UNQUANTIZED_TIERS else fastest
    return config.changed({"rollout.explore.precision": tier})
