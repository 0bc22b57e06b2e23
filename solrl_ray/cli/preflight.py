"""All checks before a run starts, in one list, fast ones first: keys, cluster, prompts, folder, the user's functions,
checkpoint, rewards, initial policy.

The checks create nothing, load no weights and use no device. A check that needs a slow import does it itself, so that
earlier checks report their errors at once.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

from solrl_ray.cli import guidance
from solrl_ray.common import progress_note, ray_auth
from solrl_ray.common.deadlines import in_time
from solrl_ray.common.files import READ_SECONDS, lacks_space, located, refuses_files
from solrl_ray.common.lazy_imports import import_large
from solrl_ray.config import checks, own_functions
from solrl_ray.config.loading import Sources
from solrl_ray.config.pools import pools
from solrl_ray.config.problems import counted
from solrl_ray.config.rewards import RewardConfig
from solrl_ray.config.schema import Config, EvaluationConfig
from solrl_ray.errors import UserError
from solrl_ray.models import FAMILIES, scored
from solrl_ray.planning import model_facts, outline
from solrl_ray.planning.arithmetic import ModelFacts
from solrl_ray.records import Prompt

TOLD_SECONDS = 5.0
"""Seconds between two progress lines of a slow check."""
BEFORE = "before the run starts: "
"""Beginning of a plan's note on something that is missing on this machine; the key follows."""
JOB_FOLDERS = "working_dir_files"
"""Name of the folder in which Ray keeps the uploaded working directories of jobs."""

Needs = Literal["configuration", "cards", "files", "folder"]
"""Input of a check. ``configuration``: only the values. ``cards``: the cluster to join, or this machine. ``files``:
prompts, checkpoints and the user's functions. ``folder``: the run folder and the initial policy.
"""


@dataclass(slots=True)
class Run:
    """A run to check, and the results of the checks, so that each file is read once."""

    config: Config
    sources: Sources = field(default_factory=Sources)
    address: str | None = None
    """Address of the Ray cluster to join; None: a local Ray will be started."""
    resumes: bool = False
    """Whether the run folder exists and the run is resumed."""
    planned: bool = False
    """Whether the run is only planned: missing files are notes, and the user's functions are not tried."""
    elsewhere: bool = False
    """Whether the run uses no GPU of this machine."""
    evaluates: bool = False
    """Whether the run only evaluates. Then it has no previews, whose videos may have fewer frames."""
    train: tuple[Prompt, ...] = ()
    heldout: tuple[Prompt, ...] = ()
    facts: ModelFacts | None = None
    outlined: bool = False
    """Whether `facts` come from the package instead of the checkpoint."""
    notes: list[str] = field(default_factory=list)
    """Hints for the user, one sentence each."""

    def named(self, key: str) -> str:
        """The key with its source in parentheses: ``run.root (--set)``."""
        return self.sources.named(key)


def check(run: Run, *available: Needs) -> Run:
    """Run those checks of `CHECKS` whose input is available, in order; returns `run`.

    Raises UserError, or RunError if an address does not answer or a disk hangs.
    """
    with telling():
        for work, needs in CHECKS:
            if needs in available:
                work(run)
    return run


@contextmanager
def telling() -> Iterator[None]:
    """Print this process's `progress_note`, if any, every `TOLD_SECONDS`."""
    over = threading.Event()

    def print_progress() -> None:
        while not over.wait(TOLD_SECONDS):
            if words := progress_note.now():
                print(f"{words} …", flush=True)

    threading.Thread(target=print_progress, name="progress of the checks", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def configuration(run: Run) -> None:
    """Reject values that contradict each other."""
    checks.check(run.config, run.sources)


def family(run: Run) -> None:
    """Reject guidance, or a number of reference images, that the model family does not support."""
    guidance.check(run.config, run.sources)
    config = run.config.model
    known = FAMILIES.get(config.family)  # an unknown family is rejected together with its checkpoint
    if known and (why := known.SIZES.why_not_references(config)):
        raise UserError(f"{run.named('model.references')} is {config.references}, but {why}.")


def names(run: Run) -> None:
    """Reject files in a Ray job's folder with the names of modules of Python or of this package's dependencies: that
    folder comes first on the import path of all processes of a job.
    """
    needed = {re.split(r"[^\w-]", need)[0].replace("-", "_") for need in metadata.requires("solrl_ray") or ()}
    for file in sorted(Path.cwd().glob("*.py")) if JOB_FOLDERS in Path.cwd().parts else ():
        if file.stem in (sys.stdlib_module_names - {"test"}) | needed:
            raise UserError(
                f"{file.name} in the job's folder has the same name as the module {file.stem}, and every process of "
                "the job would import it instead of the module; rename it."
            )


def cluster(run: Run) -> None:
    """Reject an address without a Ray cluster that accepts this user, and workers with GPUs if a local Ray would find
    none.
    """
    if run.address:
        return ray_auth.cluster_at(run.address)
    ray, config = sys.modules.get("ray"), run.config
    if _has_gpus() or (ray is not None and ray.is_initialized()):
        return None
    workers = {f"fleet.{name}": pool for name, pool in pools(config.fleet).items()}
    workers["fleet.learners"] = config.fleet.learners  # type: ignore[assignment]
    for key in (f"{key}.num_gpus" for key, worker in workers.items() if worker.num_gpus):
        raise UserError(
            f"{key} is {config.value_of(key):g} ({run.sources.of(key)}), but this machine has no GPU. Start the "
            "run on a machine with GPUs, or name a cluster with --address. Without a clusters preset, the demo's model "
            "trains on CPUs; `solrl plan` needs no GPU."
        )


def _has_gpus() -> bool:
    """Whether this process can use a GPU of this machine, by its device files; does not query the driver."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "unset").strip() in ("", "-1"):
        return False
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists() or Path("/dev/kfd").exists()


def trackers(run: Run) -> None:
    """Reject trackers whose packages are not installed."""
    for name in run.config.tracking.trackers:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"tracking.trackers contains {name} ({run.sources.of('tracking.trackers')}), but its package is not "
                f"installed; pip install {name}, or install this package with its extra {name}."
            )


def prompts(run: Run) -> None:
    """Refuse files that are missing, too short or share a prompt; all problems at once. A plan notes missing ones."""
    missing = outline.missing(run.config) if run.planned else {}
    lacking = [key for key in ("prompts.train", "prompts.heldout") if key in missing]
    run.notes += [_before_it_starts(run.named(key), missing[key]) for key in lacking]
    if not lacking:
        _read_prompts(run)


def _before_it_starts(key: str, place: str) -> str:
    return f"{BEFORE}{key} is {place!r}, which is not on this machine"


def _read_prompts(run: Run) -> None:
    from solrl_ray.prompts.prompt_set import read_prompts

    config, wrong = run.config, list[str]()
    for file in ("train", "heldout"):
        path = config.value_of(f"prompts.{file}")
        try:
            with progress_note.progress_note(f"reading {path}"):
                named = run.named(f"prompts.{file}")
                deadlines = config.fleet.deadlines
                found = tuple(read_prompts(path, named, config.model.shapes, config.model.references, deadlines))
        except UserError as error:
            wrong.append(str(error))
            continue
        setattr(run, file, found)
    wrong += _too_few(run)
    known = {prompt.id for prompt in run.train}
    if shared := [prompt for prompt in run.heldout if prompt.id in known]:
        wrong.append(
            f"prompts.heldout is {config.prompts.heldout} ({run.sources.of('prompts.heldout')}), and "
            f"{len(shared)} of its prompts are also in prompts.train, such as {shared[0].text!r}; "
            "an evaluation needs prompts that were never trained on."
        )
    if wrong:
        raise UserError(" ".join(wrong))


def _too_few(run: Run) -> Iterator[str]:
    """Problems of files with few prompts; notes that there are fewer held-out prompts than an evaluation takes."""
    config, most = run.config, len(run.train)
    if 0 < most < config.rollout.prompts:
        right = f"at most {most}, the number of distinct prompts in prompts.train, {config.prompts.train}"
        fewer = (config.changed({"rollout.prompts": count}) for count in range(most, 0, -1))
        if fits := next(filter(_is_consistent, fewer), None):
            right += f": add --set rollout.prompts={fits.rollout.prompts}"
        yield checks.Problem("rollout.prompts", right).sentence(config, run.sources)
    evaluated, asked = len(run.heldout), config.evaluation.prompts
    if evaluated == 1 and config.run.on_collapse != "warn":
        right = f"warn with the single prompt of {config.prompts.heldout}: its reward has no error"
        yield checks.Problem("run.on_collapse", right).sentence(config, run.sources)
    if 0 < evaluated < asked:
        run.notes.append(
            f"prompts.heldout has {counted(evaluated, 'distinct prompt')}: evaluations use all of them "
            f"(evaluation.prompts is {asked})"
        )


def _is_consistent(config: Config) -> bool:
    try:
        checks.check(config)
    except UserError:
        return False
    return True


def init(run: Run) -> None:
    """Reject a missing initial policy; `first_policy` reads it."""
    init = run.config.run.init
    if init and not run.resumes and not located(init, "run.init").exists():
        raise UserError(
            f"run.init is {init!r} ({run.sources.of('run.init')}), which does not exist; it must be a run folder, "
            "a checkpoint of a run, or a LoRA file."
        )


def folder(run: Run) -> None:
    """Reject a folder that is not writable, has too little free space, or already contains a run."""
    from solrl_ray.storage.run_folder import RunFolder

    config, named = run.config, f"run.root is {run.config.run.root} ({run.sources.of('run.root')})"
    root = located(config.run.root, "run.root").absolute()
    if JOB_FOLDERS in root.parts:
        raise UserError(
            f"{named}, which is in the folder of a Ray job, and Ray deletes that folder after the job; it must be an "
            "absolute path on a persistent disk of the cluster."
        )

    path = root / config.run.name

    def look() -> None:
        existing = next(folder for folder in (root, *root.parents) if folder.exists())
        if len(os.fsencode(config.run.name)) > (most := os.pathconf(existing, "PC_NAME_MAX")):
            raise UserError(
                f"{run.named('run.name')} begins with {config.run.name[:40]!r} and is too long: names in {existing} "
                f"have at most {most} bytes. Choose a shorter name."
            )
        existing = path if path.exists() else existing
        if reason := refuses_files(existing):
            raise UserError(f"{named}, but {existing} {reason}.")
        if lacking := lacks_space(root, config.checkpoints.min_free_gb):
            raise UserError(f"{named}, but {lacking}.")
        if not run.resumes:
            RunFolder.of(config).check_new(config)

    in_time(look, what=f"{named}: checking it", seconds=READ_SECONDS)


def resumable(run: Run) -> None:
    """Reject a run folder that cannot be resumed. If another process uses it, wait for that process to end."""
    if not run.resumes:
        return
    from solrl_ray.storage.resume import check_readable
    from solrl_ray.storage.run_folder import RESUME_PATIENCE, RunFolder

    folder = RunFolder.of(run.config)
    if folder.lock.held:
        wait = f"waiting up to {RESUME_PATIENCE:g} s for it to end"
        print(f"note: another process uses {folder.path}; {wait}", flush=True)
        folder.lock.acquire(seconds=RESUME_PATIENCE)
        folder.lock.release()
    what, seconds = f"reading {folder.path} (fleet.deadlines.checkpoint)", run.config.fleet.deadlines.checkpoint
    in_time(lambda: check_readable(folder, run.config), what=what, seconds=seconds)


def functions(run: Run) -> None:
    """Try the user's functions on two images, `evaluation.reference` on two prompts, and print their results. Functions
    that fail are rejected with their traceback.
    """
    config, own = run.config, dict[str, RewardConfig | EvaluationConfig]()
    own |= {f"rewards.{i}.kind": reward for i, reward in enumerate(config.rewards) if ":" in reward.kind}
    keys = list(own)
    if config.evaluation.reference and not own_functions.is_shipped(config.evaluation.reference):
        own["evaluation.reference"] = config.evaluation
    if not own or run.planned:
        return
    from solrl_ray.cli import reward_trial
    from solrl_ray.prompts.prompt_set import two_prompts

    tried, shapes = two_prompts(config, run.sources), tuple(config.model.shapes) if run.evaluates else scored(config)
    trials = [own_functions.Trial(run.named(key), each, shapes, *tried) for key, each in own.items()]
    gpu = config.fleet.explorers.num_gpus > 0
    given = reward_trial.in_child(trials, gpu=gpu, seconds=config.fleet.deadlines.start)
    for trial, scores in zip(trials, given or (), strict=False):
        shown = " and ".join(f"{score:.4g}" for score in scores)
        same = ", which are equal: a run learns only from rewards that differ" if len(set(scores)) == 1 else ""
        what = "videos" if trial.shapes[0].frames else "images"
        print(f"tried {trial.spec}: {shown} for two {what} of noise{same}", flush=True)
    if "evaluation.reference" in own:
        print(f"tried {config.evaluation.reference}: it drew images for two prompts", flush=True)
    if given is None:
        print(f"note: {', '.join(keys)} will be tried on one explorer's GPU before the others start", flush=True)


def model(run: Run) -> None:
    """Reject a missing checkpoint, impossible sizes, a LoRA target that matches no layer, and a tier that explorers
    cannot compute. Adds notes on a large model on CPUs, on truncated prompts, and on missing checkpoints if a preset's
    model is only planned.
    """
    config = run.config
    if run.planned and (facts := outline.shipped_facts(config, run.sources)):
        run.facts, run.outlined = facts, True
        missing = {key: path for key, path in outline.missing(config).items() if not key.startswith("prompts.")}
        download = "; `solrl list` shows the command that downloads it"
        run.notes += [_before_it_starts(run.named(key), path) + download for key, path in missing.items()]
    else:
        # PyTorch and diffusers take seconds to import: import everything that the checks below need at once.
        import_large("solrl_ray.storage.warm_start")
        run.facts = model_facts.model_facts(config, run.sources, elsewhere=run.elsewhere)
        guidance.check_checkpoint(config, run.sources)
        run.notes += model_facts.truncation(config, run.train + run.heldout) if run.train else ()
    if note := outline.without_gpus(config, run.facts):
        run.notes.append(note)


def rewards(run: Run) -> None:
    """Reject rewards that cannot be loaded or do not accept images of this size, and a built-in `evaluation.reference`
    that cannot draw these prompts.
    """
    if run.outlined:
        return
    from solrl_ray import rewards
    from solrl_ray.prompts import references
    from solrl_ray.rewards import trial

    config, notes = run.config, run.notes
    tell = (lambda missing: notes.append(f"{BEFORE}{missing}")) if run.planned else None
    rewards.check(config.rewards, config.model.shapes, run.named, tell=tell)
    if own_functions.is_shipped(config.evaluation.reference) and run.heldout:
        key, tried = run.named("evaluation.reference"), (run.heldout[0], run.heldout[-1])
        files = tuple(map(references.contents, tried)) if config.model.references else ()
        texts = tried[0].text, tried[1].text
        trial.here([own_functions.Trial(key, config.evaluation, config.model.shapes, texts, files)], "cpu")


def first_policy(run: Run) -> None:
    """Reject an initial policy (run, checkpoint or LoRA file) of another model."""
    if run.config.run.init and not run.config.run.init_digest:  # a run that has begun has a copy in its run folder
        from solrl_ray.storage.warm_start import warm_start

        warm_start(run.config, run.sources)


def upload(run: Run) -> None:
    """Reject a `checkpoints.upload` URL whose protocol no installed package supports."""
    if url := run.config.checkpoints.upload:
        from solrl_ray.storage.checkpoints import filesystem

        filesystem(url, run.named("checkpoints.upload"))


CHECKS: tuple[tuple[Callable[[Run], None], Needs], ...] = (
    (configuration, "configuration"),
    (family, "configuration"),
    (names, "cards"),
    (cluster, "cards"),
    (trackers, "cards"),
    (prompts, "files"),
    (init, "folder"),
    (folder, "folder"),
    (resumable, "folder"),
    (functions, "files"),
    (model, "files"),
    (rewards, "files"),
    (first_policy, "folder"),
    (upload, "folder"),
)
