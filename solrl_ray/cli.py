"""The command line: ``solrl train``, ``plan``, ``list``, ``submit``, ``status``, ``pool``, ``trace``, ``report``.

Exit status: 0 done; 1 the run could not go on; 2 the input must be mended first; 130 interrupted; 141 nobody
reads what is printed any more.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import solrl_ray
from solrl_ray import access
from solrl_ray.config import checks, continuation, families
from solrl_ray.config.arithmetic import Arithmetic
from solrl_ray.config.loading import Loaded, load_with_sources
from solrl_ray.errors import RunError, UserError
from solrl_ray.files import replace_file

RUN_FAILED, BAD_INPUT, INTERRUPTED, UNREAD = 1, 2, 130, 141

_REFUSALS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EISDIR,
    errno.ENOTDIR,
}
"""What is wrong with a disk, a permission or a path, and said in a sentence."""


def train(arguments: argparse.Namespace) -> int:
    """Load, check, print the arithmetic, and hand over to the system."""
    if arguments.go_on and arguments.resume is None and _begun(arguments):
        arguments.resume = ""
    loaded = _resumed(arguments) if arguments.resume is not None else _fresh(arguments)
    _check_system()
    if arguments.dry_run and arguments.resume is None:
        from solrl_ray.run_folder import RunFolder

        RunFolder.of(loaded.config).check_new(loaded.config)
    _print_plan(loaded)
    if arguments.dry_run:
        return 0
    access.settle(local=_address(arguments) is None)
    from actors import commands

    return commands.train(
        loaded.config,
        resume=arguments.resume is not None,
        address=arguments.address,
        live=not arguments.no_live,
    )


def plan(arguments: argparse.Namespace) -> int:
    """Print the arithmetic of a run, on a named card its times, and with a cluster what that lacks; start nothing."""
    counts = {
        "fleet.explorers.count": arguments.explorers,
        "fleet.regenerators.count": arguments.regenerators,
        "learner.world_size": arguments.learners,
    }
    arguments.set += [f"{key}={count}" for key, count in counts.items() if count is not None]
    loaded = _fresh(arguments)
    arithmetic = _print_plan(loaded)
    if arguments.gpu or arguments.machines:
        from solrl_ray.scheduling.forecast import times

        print(times(arithmetic, arguments.machines, arguments.gpu), flush=True)
    if arguments.address:
        access.settle(local=False)
        from actors import commands

        commands.resources(loaded.config, arguments.address)
    return 0


def list_parts(arguments: argparse.Namespace) -> int:
    """Print the parts that runs are put together from, and which checkpoints are there."""
    from solrl_ray import catalogue

    print(catalogue.table(arguments.configs))
    return 0


def report(arguments: argparse.Namespace) -> int:
    """Build the report of a run folder again."""
    folder: Path = arguments.run
    continuation.stored(folder)
    from solrl_ray.report import build

    print(build(folder))
    return 0


def evaluate(arguments: argparse.Namespace) -> int:
    """Score policies of a run folder on held-out prompts."""
    run: Path = arguments.run
    continuation.stored(run)
    overrides = [
        f"{key}={json.dumps(value)}"
        for key, value in (
            ("prompts.heldout", arguments.prompts),
            ("evaluation.samples", arguments.samples),
            ("evaluation.steps", arguments.steps),
            ("rollout.solver", arguments.solver),
        )
        if value is not None
    ]
    file = run / continuation.FILE
    loaded = load_with_sources([file], [*overrides, *arguments.set])
    _check_system()
    from solrl_ray.run_folder import RunFolder

    cluster = None if arguments.alone else RunFolder(run).live_cluster()
    access.settle(local=(_address(arguments) or cluster) is None)
    from actors import evaluation, live_evaluation
    from solrl_ray import evaluation_request as asked
    from solrl_ray import preflight

    if arguments.out and arguments.out.exists() and not arguments.out.is_dir():
        raise UserError(f"--out is {arguments.out}, a file; it must be a folder.")
    policies = asked.policies_of(arguments.policies)
    config = asked.evaluation_config(loaded, file, arguments.rewards, all_prompts=arguments.prompts is not None)
    checks.check(config, loaded.sources)
    preflight.check(config, loaded.sources)
    state = asked.state_of(run, arguments.updates)
    out = arguments.out or asked.free_folder(run, state.updates)
    request = evaluation.Request(run=run.absolute(), out=out.absolute(), policies=policies)
    page = live_evaluation.page(config, state, request, address=cluster) if cluster else None
    if page is None:
        page = evaluation.evaluate(config, state, request, address=arguments.address, live=not arguments.no_live)
    print(f"{(out / 'evaluation.txt').read_text()}\npage: {page}")
    return 0


def import_prompts(arguments: argparse.Namespace) -> int:
    """Turn a prompt set into the files that a run reads."""
    from solrl_ray import prompt_sets

    heldout = int(arguments.heldout) if (arguments.heldout or "").isdigit() else arguments.heldout
    imported = prompt_sets.import_prompts(
        arguments.source, name=arguments.name, heldout=heldout, column=arguments.column
    )
    files = prompt_sets.write_prompts(imported, arguments.out)
    print(prompt_sets.report(imported, arguments.name, files))
    return 0


def submit(arguments: argparse.Namespace) -> int:
    """Submit ``solrl train`` with the present folder to a cluster's Job server."""
    resume = arguments.resume
    here = Path.cwd().resolve()
    files = [_inside(path, here) for path in arguments.config]
    passed = [*files, *(part for text in arguments.set for part in ("--set", text))]
    if resume is not None:
        passed += ["--resume", *([resume] if resume else [])]
    if resume:
        if not Path(resume).is_absolute():
            raise UserError(f"--resume is {resume}; a submitted run needs its folder's absolute path on the cluster.")
        name = Path(resume).name
    else:
        loaded = _fresh(arguments)
        name, root = loaded.config.run.name, loaded.config.run.root
        if not Path(root).is_absolute():
            raise UserError(
                f"run.root is {root!r} ({loaded.sources.of('run.root')}); it must be an absolute path on a disk that "
                "the cluster keeps, because a submitted job's own folder is removed."
            )
    access.settle(local=False)
    from actors import jobs

    address = arguments.address or os.environ.get("RAY_API_SERVER_ADDRESS")
    if not address:
        raise UserError("--address is missing; it must be the dashboard's address, such as http://head:8265.")
    return jobs.submit(name, passed, address=address, folder=here, follow=not arguments.no_wait)


def status(arguments: argparse.Namespace) -> int:
    """Print how a run is: from its controller if it is live, else from its folder."""
    folder: Path | None = arguments.run
    access.settle(local=False)
    from rich.console import Console

    from actors import watching
    from solrl_ray.report import stored_progress
    from solrl_ray.report.live import render
    from solrl_ray.run_folder import RunFolder

    address = _address(arguments) or (RunFolder(folder).live_cluster() if folder else None)
    progress = watching.live_progress(folder, address=address) if address else None
    if progress is None and folder is not None:
        progress = stored_progress(folder)
    if progress is None:
        where = f"on the cluster at {address}" if address else "known"
        raise UserError(f"No live run is {where}; name a run folder, or with --address the cluster of a live run.")
    Console().print(render(progress))
    return 0


def scale(arguments: argparse.Namespace) -> int:
    """Have a live run work with more or fewer explorers or regenerators."""
    asked = {"explorers": arguments.explorers, "regenerators": arguments.regenerators}
    sizes = {pool: size for pool, size in asked.items() if size is not None}
    folder: Path | None = arguments.run
    if folder is not None:
        continuation.stored(folder)
    access.settle(local=False)
    from actors import watching
    from solrl_ray.run_folder import RunFolder

    address = _address(arguments) or (RunFolder(folder).live_cluster() if folder else None)
    if address is None:
        what = f"The run in {folder} is not live" if folder else "No live run is known"
        raise UserError(f"{what}; name the folder of a live run, or with --address its cluster.")
    print(watching.scale(folder, sizes, address=address))
    return 0


def trace(arguments: argparse.Namespace) -> int:
    """Write the timeline of a run folder as JSON for Perfetto."""
    folder: Path = arguments.run
    continuation.stored(folder)
    from solrl_ray.report.trace import read_spans, timeline

    target: Path = arguments.out or folder / "trace.json"
    if target.is_dir():
        raise UserError(f"--out is {target}, a folder; it must be a file.")
    replace_file(target, json.dumps(timeline(read_spans(folder))).encode())
    print(f"{target}: open it at ui.perfetto.dev or chrome://tracing")
    return 0


def _address(arguments: argparse.Namespace) -> str | None:
    """The Ray cluster to join: ``--address``, or RAY_ADDRESS as in a submitted job."""
    address: str | None = arguments.address or os.environ.get("RAY_ADDRESS")
    return address


def _inside(path: Path, folder: Path) -> str:
    """`path` as the job will see it."""
    if not path.resolve().is_relative_to(folder):
        raise UserError(f"The configuration file {path} is outside of {folder}, which is what the job is given.")
    return str(path.resolve().relative_to(folder))


def doctor(arguments: argparse.Namespace) -> int:
    """Test what this machine can do; status 1 if one fails: a tier that its devices should have, the storage."""
    from solrl_ray.doctor import examine

    failed = 0
    for finding in examine(arguments.root):
        failed += finding.state == "FAILS"
        print(f"{finding.part:<10} {finding.what:<20} {finding.state:<6} {finding.detail}", flush=True)
    return RUN_FAILED if failed else 0


def _fresh(arguments: argparse.Namespace) -> Loaded:
    files, overrides = arguments.config, arguments.set
    init: str = getattr(arguments, "init", "")
    if init:
        files = files or [_configuration_of(Path(init))]
        overrides = [f"run.init={json.dumps(init)}", "run.init_digest=''", *overrides]
    if not files:
        raise UserError("No configuration file was given; name at least one, such as configs/demo.yaml.")
    loaded = load_with_sources(files, overrides)
    checks.check(loaded.config, loaded.sources)
    return loaded


def _configuration_of(init: Path) -> Path:
    run = continuation.origin(init)
    if run is None:
        raise UserError(f"--from {init} is no run folder and no checkpoint of one; with a LoRA file name CONFIG, too.")
    return run / continuation.FILE


def _begun(arguments: argparse.Namespace) -> bool:
    run = _fresh(arguments).config.run
    from solrl_ray.run_folder import RunFolder

    return RunFolder(Path(run.root).expanduser() / run.name).begun


def _resumed(arguments: argparse.Namespace) -> Loaded:
    """The configuration to resume with: the run folder's, or the given one if it agrees with that."""
    if arguments.resume:
        folder = Path(arguments.resume)
        # The folder may have been moved: where it is now counts, not where it was begun.
        place = [f"run.root='{folder.absolute().parent}'", f"run.name='{folder.absolute().name}'"]
        continuation.stored(folder)
        loaded = load_with_sources(arguments.config or [folder / continuation.FILE], [*place, *arguments.set])
    elif arguments.config:
        loaded = load_with_sources(arguments.config, arguments.set)
        folder = Path(loaded.config.run.root).expanduser() / loaded.config.run.name
    else:
        raise UserError("--resume needs a run folder or the run's configuration files.")
    was = continuation.stored(folder)
    loaded = replace(loaded, config=continuation.carried(loaded.config, was))
    checks.check(loaded.config, loaded.sources)
    continuation.check(loaded.config, was, folder, loaded.sources)
    for note in continuation.notes(loaded.config, was):
        print(f"note: {note}", file=sys.stderr)
    return loaded


def _print_plan(loaded: Loaded) -> Arithmetic:
    # Imported here: diffusers takes seconds, and a misspelt key should be told at once.
    from solrl_ray import preflight

    inputs = preflight.check(loaded.config, loaded.sources)
    arithmetic = preflight.plan(loaded.config, inputs)
    print(arithmetic.table(), flush=True)
    for note in inputs.notes:
        print(f"note: {note}", flush=True)
    for warning in families.warnings(loaded.config):
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    return arithmetic


def _check_system() -> None:
    """Raise UserError unless the package `actors` is the one that belongs to this `solrl_ray`."""
    import actors

    found, ours = Path(str(actors.__file__)).parent, Path(solrl_ray.__file__).parent.with_name("actors")
    if found.resolve() != ours.resolve():
        raise UserError(
            f"The package 'actors' was imported from {found}, but solrl_ray's own is {ours}; "
            "start from another folder or remove the other package."
        )


class _Parser(argparse.ArgumentParser):
    """Wrong arguments end like other bad input: one sentence, status 2."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[:1].upper()}{message[1:]}; see {self.prog} --help.")


def parser() -> argparse.ArgumentParser:
    top = _Parser(prog="solrl", description="Reinforcement learning for text-to-image diffusion models on Ray.")
    top.add_argument("--version", action="version", version=f"solrl {solrl_ray.__version__}")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="COMMAND", parser_class=_Parser)

    configured = _Parser(add_help=False)
    configured.add_argument("config", nargs="*", type=Path, metavar="CONFIG", help="YAML files; later ones win")
    configured.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="set one key, such as rollout.pool=64"
    )

    command = verbs.add_parser("train", parents=[configured], help="train a policy")
    command.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN",
        help="continue the run in this folder, or the run that CONFIG names",
    )
    command.add_argument(
        "--from",
        dest="init",
        default="",
        metavar="RUN|LORA",
        help="begin with the policy of a run, one of its checkpoints or a LoRA file; without CONFIG, with the "
        "configuration of that run: --from runs/demo --set run.name=fork",
    )
    command.add_argument(
        "--continue", dest="go_on", action="store_true", help="begin the run, or resume it if its folder holds one"
    )
    command.add_argument("--dry-run", action="store_true", help="check everything, print the arithmetic, stop")
    command.add_argument("--address", metavar="ADDRESS", help="a running Ray cluster; default: start a local one")
    command.add_argument("--no-live", action="store_true", help="plain lines instead of the live view")
    command.set_defaults(run_verb=train)

    command = verbs.add_parser("plan", parents=[configured], help="print the arithmetic of a run")
    command.add_argument("--address", metavar="ADDRESS", help="a Ray cluster: say what it lacks for this run")
    command.add_argument("--gpu", metavar="NAME", help="say how long it takes: on h200, b200, or by a file of costs")
    command.add_argument("--cluster", dest="machines", type=Path, metavar="FILE", help="YAML: gpu, nodes, network, …")
    for role in ("explorers", "regenerators", "learners"):
        command.add_argument(f"--{role}", type=int, metavar="N", help=f"instead of the configuration's {role}")
    command.set_defaults(run_verb=plan)

    command = verbs.add_parser("list", help="models, families, methods and rewards that a run is put together from")
    command.add_argument("--configs", type=Path, default=Path("configs"), metavar="FOLDER", help="default: ./configs")
    command.set_defaults(run_verb=list_parts)

    command = verbs.add_parser("submit", parents=[configured], help="train on a cluster, as a Ray job")
    command.add_argument("--address", metavar="URL", help="the cluster's dashboard, such as http://head:8265")
    command.add_argument("--resume", nargs="?", const="", metavar="RUN", help="continue a run, as for train")
    command.add_argument("--no-wait", action="store_true", help="return once the job is submitted")
    command.set_defaults(run_verb=submit)

    command = verbs.add_parser("status", help="how a run is")
    command.add_argument("run", nargs="?", type=Path, metavar="RUN", help="run folder; default: the cluster's live run")
    command.add_argument("--address", metavar="ADDRESS", help="the Ray cluster that it runs on; auto: this machine's")
    command.set_defaults(run_verb=status)

    command = verbs.add_parser("pool", help="the workers of a live run")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=_Parser)
    action = actions.add_parser("scale", help="have more or fewer of them; the results stay the same")
    action.add_argument("run", nargs="?", type=Path, metavar="RUN", help="run folder; default: the cluster's live run")
    for role in ("explorers", "regenerators"):
        action.add_argument(f"--{role}", type=int, metavar="N", help=f"how many {role} there are to be, at least 1")
    action.add_argument("--address", metavar="ADDRESS", help="the Ray cluster that it runs on; auto: this machine's")
    action.set_defaults(run_verb=scale)

    command = verbs.add_parser("trace", help="write a run's timeline for Perfetto")
    command.add_argument("run", type=Path, metavar="RUN", help="run folder, such as runs/demo")
    command.add_argument("--out", type=Path, metavar="FILE", help="default: trace.json in the run folder")
    command.set_defaults(run_verb=trace)

    command = verbs.add_parser("report", help="build the report of a run folder again")
    command.add_argument("run", type=Path, metavar="RUN", help="run folder, such as runs/demo")
    command.set_defaults(run_verb=report)

    _prompts_parser(verbs)
    command = verbs.add_parser("doctor", help="test what this machine can do: devices, precision tiers, storage")
    command.add_argument("--root", type=Path, default=Path("runs"), metavar="FOLDER", help="where runs are kept")
    command.set_defaults(run_verb=doctor)
    _eval_parser(verbs)
    return top


def _eval_parser(verbs: Any) -> None:
    command = verbs.add_parser("eval", help="score a run's policies on held-out prompts with any rewards")
    command.add_argument("run", type=Path, metavar="RUN", help="run folder, such as runs/demo")
    command.add_argument("--policies", default="base,ema", metavar="LIST", help="of base, lora, ema; default: base,ema")
    command.add_argument("--rewards", nargs="+", type=Path, default=[], metavar="FILE", help="YAML files with rewards")
    command.add_argument("--prompts", metavar="FILE", help="held-out prompts; default: the run's")
    command.add_argument("--samples", type=int, metavar="N", help="images a prompt, at fixed addresses")
    command.add_argument("--steps", type=int, metavar="N", help="solver steps")
    command.add_argument("--solver", metavar="NAME", help="euler or dpm2; default: the run's")
    command.add_argument("--updates", type=int, metavar="N", help="the checkpoint after N updates; default: the newest")
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="set one key, as for train")
    command.add_argument("--out", type=Path, metavar="DIR", help="default: eval/updates-N in the run folder")
    command.add_argument("--alone", action="store_true", help="borrow nothing from the run, even if it is live")
    command.add_argument("--address", metavar="ADDRESS", help="a running Ray cluster; default: start a local one")
    command.add_argument("--no-live", action="store_true", help="plain lines instead of the live view")
    command.set_defaults(run_verb=evaluate)


def _prompts_parser(verbs: Any) -> None:
    command = verbs.add_parser("prompts", help="prompt sets")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=_Parser)
    action = actions.add_parser("import", help="make the prompt files of a run from a published set or a table")
    action.add_argument("source", metavar="SOURCE", help="file, folder with train and test files, or a data set's id")
    action.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder for train and heldout .jsonl")
    action.add_argument("--name", default="", choices=("pickscore", "drawbench"), help="which published set it is")
    action.add_argument("--heldout", metavar="N|FILE", help="split off N prompts, or hold out those of FILE")
    action.add_argument("--column", default="", metavar="NAME", help="the column that holds the prompts")
    action.set_defaults(run_verb=import_prompts)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; errors of the user's are printed as one sentence."""
    # Without it transformers tells everybody, at each import, which optional packages it would like.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    arguments = argparse.Namespace()
    try:
        parser().parse_args(argv, arguments)
        status = int(arguments.run_verb(arguments))
        sys.stdout.flush()  # not later, when nobody would catch what it raises
        return status
    except UserError as error:
        return _failed(error, BAD_INPUT)
    except RunError as error:
        return _failed(error, RUN_FAILED)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _unread():
            return UNREAD
        if not _refused(error, arguments):
            raise
        where = error.filename2 or error.filename
        return _failed(RunError(f"{f'{where}: ' if where else ''}{error.strerror}"), RUN_FAILED)
    except KeyboardInterrupt:
        print("\ninterrupted; a run that had begun continues with --resume", file=sys.stderr)
        return INTERRUPTED


def _unread() -> bool:
    """Whether nobody reads what this command prints any more, as in ``solrl list | head``; the rest is dropped then."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _refused(error: OSError, arguments: argparse.Namespace) -> bool:
    """Whether the system refused what the user asked for; else the error is ours or a library's, and needs its place.

    A file that is not there is the user's if the command named it.
    """
    if error.errno != errno.ENOENT:
        return error.errno in _REFUSALS
    values = [value if isinstance(value, list) else [value] for value in vars(arguments).values()]
    return str(error.filename) in {str(path) for paths in values for path in paths}


def _failed(error: Exception, status: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return status
