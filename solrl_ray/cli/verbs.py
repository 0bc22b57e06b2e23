"""The functions of the `solrl` commands. Slow imports are inside the functions that need them."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from solrl_ray.cli import planned, preflight
from solrl_ray.cli.configured import begun, fresh, resumed
from solrl_ray.cli.preflight import Run
from solrl_ray.common import interrupts, ray_auth
from solrl_ray.common.files import make_folder
from solrl_ray.common.progress_note import progress_note
from solrl_ray.config import own_functions, problems
from solrl_ray.config.loading import load_with_sources
from solrl_ray.errors import RunError, UserError
from solrl_ray.storage import continuation


def train(arguments: argparse.Namespace) -> int:
    """Load, check, print the main figures, and start the run; `plan.txt` in its folder has the whole plan."""
    interrupts.listen()
    if arguments.go_on and arguments.resume is None and begun(arguments):
        arguments.resume = ""
    loaded = resumed(arguments) if arguments.resume is not None else fresh(arguments)
    run = Run(loaded.config, loaded.sources, address=_address(arguments), resumes=arguments.resume is not None)
    plan = planned.planned(preflight.check(run, "configuration", "cards", "folder", "files"))
    from solrl_ray.storage.run_folder import PLAN_FILE, RunFolder

    if arguments.verbose or arguments.dry_run:
        print(plan.whole() if arguments.verbose else plan.short(), flush=True)
    else:
        print(plan.start(str(RunFolder.of(loaded.config).path / PLAN_FILE)), flush=True)
    _warn(plan)
    if arguments.dry_run:
        print("dry run: all checks passed, nothing was started", flush=True)
        return 0
    ray_auth.settle(local=_address(arguments) is None)
    from actors.client import launch

    return launch.train(
        loaded.config,
        resume=arguments.resume is not None,
        address=arguments.address,
        live=not arguments.no_live,
        facts=plan.arithmetic.facts,
        plan=plan.whole(),
    )


def plan(arguments: argparse.Namespace) -> int:
    """Print whether a run fits, what it does and how long it takes; start nothing."""
    cluster = None
    if arguments.gpu or arguments.machines:
        from solrl_ray.planning.prices import cluster_of

        cluster = cluster_of(arguments.machines, arguments.gpu)
    loaded = fresh(arguments)
    preflight.check(Run(loaded.config, loaded.sources), "configuration")  # before a GPU's tier replaces auto
    if arguments.address:
        ray_auth.cluster_at(arguments.address)
    if cluster:
        loaded = planned.on_cluster(loaded, cluster)
    run = Run(loaded.config, loaded.sources, planned=True, elsewhere=cluster is not None)
    plan = planned.planned(preflight.check(run, "files"), cluster)
    print(plan.whole() if arguments.verbose else plan.short(), flush=True)
    _warn(plan)
    if plan.problem:
        raise plan.problem
    if arguments.address:
        ray_auth.settle(local=False)
        from actors.client import launch

        launch.resources(loaded.config, arguments.address)
    return 0


def _warn(plan: planned.Planned) -> None:
    for warning in plan.warnings:
        print(f"warning: {warning}", file=sys.stderr, flush=True)


def list_parts(arguments: argparse.Namespace) -> int:
    """Print the presets and the checkpoints they need."""
    from solrl_ray.cli import catalogue

    print(catalogue.as_json() if arguments.json else catalogue.table())
    return 0


def show_config(arguments: argparse.Namespace) -> int:
    """Print the configuration of a run as commented YAML. It needs at least a model and a reward, or a whole run."""
    from solrl_ray.config.commented import to_commented_yaml

    if not arguments.config:
        raise UserError("No configuration was named; name presets or files. `solrl list` shows the presets.")
    prompts = [f"prompts.{name}={name}.txt" for name in ("train", "heldout")]
    try:
        loaded = load_with_sources(arguments.config, arguments.set)
    except UserError as error:
        if problems.PROMPT_FILES not in str(error):
            raise
        loaded = load_with_sources(arguments.config, [*prompts, *arguments.set])
    preflight.check(Run(loaded.config, loaded.sources), "configuration")
    print(to_commented_yaml(loaded, f"solrl config {' '.join(path.stem for path in arguments.config)}"), end="")
    return 0


def report(arguments: argparse.Namespace) -> int:
    """Rebuild the report of a run folder, or compare several runs."""
    folders: list[Path] = arguments.runs
    for folder in folders:
        continuation.stored(folder)
    if len(folders) == 1:
        from solrl_ray.report.page import build

        print(build(folders[0]))
        return 0
    from solrl_ray.report import compare_runs

    compared = compare_runs.compare(folders)
    print(compare_runs.table(compared))
    for note in compare_runs.notes(compared):
        print(f"note: {note}", flush=True)
    return 0


def evaluate(arguments: argparse.Namespace) -> int:
    """Score a run's policies on held-out prompts, with any rewards."""
    run: Path = arguments.run
    continuation.stored(run)
    options = {
        "prompts.heldout": ("--prompts", arguments.prompts),
        "evaluation.samples": ("--samples", arguments.samples),
        "evaluation.steps": ("--steps", arguments.steps),
        "rollout.solver": ("--solver", arguments.solver),
    }
    given = {key: (option, value) for key, (option, value) in options.items() if value is not None}
    file = run / continuation.FILE
    loaded = load_with_sources([file], arguments.set, given)
    ray_auth.settle(local=_address(arguments) is None)
    from actors.client import evaluate as evaluation
    from solrl_ray.evaluation import request as requests

    if arguments.out and arguments.out.exists() and not arguments.out.is_dir():
        raise UserError(f"--out is {arguments.out}, a file; it must be a folder.")
    policies = requests.policies_of(arguments.policies)
    state = requests.state_of(run, arguments.updates)  # before slower checks
    loaded = requests.evaluation_config(loaded, file, arguments.rewards, all_prompts=arguments.prompts is not None)
    config = own_functions.attached(loaded.config, loaded.sources)
    own_functions.check_owner(config, run, loaded.sources)
    for note in own_functions.changes(config, run, "the evaluation uses the current files"):
        print(f"note: {note}", file=sys.stderr)
    preflight.check(Run(config, loaded.sources, evaluates=True), "configuration", "files")
    out = arguments.out or requests.free_folder(run, state.updates)
    if arguments.out:
        make_folder(out)  # before Ray starts, so that an unwritable folder fails early
    request = evaluation.EvalRequest(run=run.absolute(), out=out.absolute(), policies=policies)
    page = evaluation.evaluate(config, state, request, address=arguments.address, live=not arguments.no_live)
    print(f"{(out / 'evaluation.txt').read_text(encoding='utf-8')}\npage: {page}")
    return 0


def import_prompts(arguments: argparse.Namespace) -> int:
    """Convert a prompt set to prompt files of a run."""
    from solrl_ray.prompts import imports

    heldout = int(arguments.heldout) if (arguments.heldout or "").isdecimal() else arguments.heldout
    with preflight.telling(), progress_note(f"reading {arguments.source}"):
        imported = imports.import_prompts(arguments.source, heldout=heldout, column=arguments.column)
        files = imports.write_prompts(imported, arguments.out, force=arguments.force)
    print(imports.report(imported, files))
    return 0


def status(arguments: argparse.Namespace) -> int:
    """Print the progress of a run, from its controller if the run is live, else from its folder."""
    folder: Path | None = arguments.run
    if folder is not None and not folder.is_dir():
        what = "it is a file" if folder.exists() else "it does not exist"
        raise UserError(f"{folder} is not a run folder: {what}.")
    ray_auth.settle(local=False)
    clusters = _clusters(arguments, folder)
    from rich.console import Console

    from actors.client import live_run
    from solrl_ray.report.data import NOT_RUNNING, STARTING, stored_progress
    from solrl_ray.report.live import render
    from solrl_ray.storage.run_folder import RunFolder

    progress = live_run.live_progress(folder, clusters=clusters) if clusters else None
    if progress is None and folder is not None:
        progress = stored_progress(folder)
    if progress is None:
        where = f"on the cluster at {' or '.join(clusters)}" if clusters else "on a cluster of this machine"
        raise UserError(f"No run is live {where}; name a run folder, or the cluster of a live run with --address.")
    Console().print(render(progress))
    if folder is not None and progress.state.startswith(NOT_RUNNING):
        print(f"resume with  {RunFolder(folder).resume_command()}")
    if progress.state == STARTING:
        print(
            "note: a process uses this run folder: the run is starting or ending, or it is on another cluster, which "
            "you can name with --address"
        )
    return 0


def scale(arguments: argparse.Namespace) -> int:
    """Change the number of explorers or regenerators of a live run."""
    requested = {"explorers": arguments.explorers, "regenerators": arguments.regenerators}
    sizes = {pool: size for pool, size in requested.items() if size is not None}
    folder: Path | None = arguments.run
    if folder is not None:
        continuation.stored(folder)
    ray_auth.settle(local=False)
    clusters = _clusters(arguments, folder)
    from actors.client import live_run

    print(live_run.scale(folder, sizes, clusters=clusters))
    return 0


def doctor(arguments: argparse.Namespace) -> int:
    """Test this machine. Returns 1 if a tier that its devices should support fails, or the storage."""
    from solrl_ray.cli.doctor import examine

    failed = 0
    for finding in examine(arguments.root):
        failed += finding.state == "FAILS"
        print(f"{finding.part:<10} {finding.what:<20} {finding.state:<6} {finding.detail}", flush=True)
    return int(failed > 0)


def validate(arguments: argparse.Namespace) -> int:
    """Compare a model with the stock pipeline on this machine and write a report. Returns 1 if a step failed."""
    from solrl_ray.cli import validate

    return validate.run(arguments)


def _address(arguments: argparse.Namespace) -> str | None:
    """Address of the Ray cluster to join: ``--address``, else RAY_ADDRESS, which submitted jobs have."""
    return arguments.address or os.environ.get("RAY_ADDRESS")


def _clusters(arguments: argparse.Namespace, run: Path | None) -> list[str]:
    """Addresses of the clusters on which to look for a live run: `_address` if given, else this user's clusters on this
    machine that answer.

    Raises RunError if none of them answers while a process uses the folder `run`.
    """
    from solrl_ray.storage.run_folder import RunFolder

    if address := _address(arguments):
        ray_auth.cluster_at(address)
        return [address]
    answering, silent = [], None
    for candidate in ray_auth.clusters_here():
        try:
            ray_auth.cluster_at(candidate)
            answering.append(candidate)
        except RunError as error:  # the cluster is shutting down or very busy
            silent = error
    if silent and not answering and run and RunFolder(run).lock.held:
        raise RunError(
            f"a process uses {run}, but {silent}; if the run was killed, the process will end soon: try again then."
        )
    return answering
