"""``solrl train`` on Ray: resolves settings that depend on the GPUs, tries custom rewards on an explorer's GPU, starts
the controller, and shows its progress until the run ends or is interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, cast

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from actors.client.connect import joined
from actors.client.controller_actor import ControllerActor
from actors.cluster import capacity, ray_messages, wait
from actors.cluster.names import CONTROLLER, namespace
from actors.fleet.actor_factory import ActorClasses, on_this_node, release_placement_groups, where
from actors.workers.devices import card, device_of, settle_tier
from solrl_ray.common import files, interrupts
from solrl_ray.common.deadlines import in_time
from solrl_ray.common.output import lost_if_refused
from solrl_ray.config import compiled_learner
from solrl_ray.config.fleet import WorkerResources
from solrl_ray.config.schema import Config
from solrl_ray.config.section import Section
from solrl_ray.config.strategies import pool_sampling
from solrl_ray.errors import RunError, UserError, WorkerGone
from solrl_ray.models import scored
from solrl_ray.models.paths import absolute
from solrl_ray.planning import fitting
from solrl_ray.planning.arithmetic import ModelFacts
from solrl_ray.policy.saving import FILE as LORA_FILE
from solrl_ray.report.data import read_run
from solrl_ray.report.live import LiveView
from solrl_ray.report.page import REPORT_FILE, build
from solrl_ray.report.rendering import digits, signed
from solrl_ray.report.summary import unchanged
from solrl_ray.rewards import trial
from solrl_ray.scheduling import placement
from solrl_ray.storage.checkpoints import Uploader, newest_state
from solrl_ray.storage.resume import check_prompts
from solrl_ray.storage.run_folder import PLAN_FILE, RAY_LOG, RESUME_PATIENCE, SUMMARY_FILE, RunFolder
from solrl_ray.storage.warm_start import warm_start

REFRESH_SECONDS = 0.5
NOTE_END_SECONDS = 5.0
UNANSWERED = 3
"""Number of consecutive progress requests without an answer after which the controller counts as hung."""


def train(
    config: Config,
    *,
    resume: bool = False,
    address: str | None = None,
    live: bool = True,
    view: LiveView | None = None,
    facts: ModelFacts | None = None,
    plan: str = "",
    classes: ActorClasses | None = None,
) -> int:
    """Train on a running cluster (`address`) or on a local Ray started for it; returns the exit status.

    Args:
        resume: continue an existing run folder; if the run is complete, no worker is started.
        live: redraw a panel if the output is a terminal; else print plain lines.
        view: replaces this display.
        facts: sizes of the model, for settings that depend on the GPU (`fitting.resolve_auto`). Without them,
            ``fleet.offload: null`` means false and ``learner.activation_memory: null`` means 0.5.
        plan: text of `plan.txt` in the run folder; empty: none is written.
        classes: other classes for the actors, for tests and benchmarks.

    Raises:
        UserError: bad input; no training state was changed.
        RunError: the run cannot continue, or its disk hangs. The run folder can be resumed.
    """
    config = compiled_learner.resolve_auto(config)
    folder, first = RunFolder.of(config), None
    if config.run.init and not resume:
        config, first = warm_start(config)

    def claim() -> bool:
        """Open the run folder; returns True if the run is complete."""
        folder.create(config, resume=resume, first=first)
        try:
            over = resume and concluded(folder)
            if not over:
                check_prompts(folder, config)
                folder.note_start(sys.argv)
                if plan:
                    files.replace_file(folder.path / PLAN_FILE, f"{plan}\n".encode())
        except BaseException:
            folder.lock.release()
            raise
        return over

    again = folder.resume_command(address)
    what = f"opening the run folder {folder.path} (fleet.deadlines.checkpoint)"
    # The deadline is at least as long as a resumed run may wait for the lock.
    over = in_time(claim, what=what, seconds=max(config.fleet.deadlines.checkpoint, 2 * RESUME_PATIENCE * resume))
    with ExitStack() as stack:
        stack.callback(folder.lock.release)
        if over:
            completed = (
                "its iteration is" if config.run.iterations == 1 else f"all {config.run.iterations} iterations are"
            )
            print(f"{completed} done; set a larger run.iterations to continue")
            build(folder.path)
            _copy_end(config, folder)
        else:
            try:
                _work(
                    config,
                    folder,
                    stack,
                    address=address,
                    view=view or LiveView(plain=not live),
                    facts=facts,
                    classes=classes or ActorClasses(),
                )
            except BaseException as error:
                interrupted = isinstance(error, KeyboardInterrupt)
                what = interrupts.reason() if interrupted else str(error) or type(error).__name__
                with suppress(OSError, RunError):
                    in_time(lambda: folder.note_end(what), what="writing events.jsonl", seconds=NOTE_END_SECONDS)
                if not interrupted:
                    raise
                when = "" if folder.begun else " while it was starting, before anything was trained"
                interrupts.words = f"{what}{when}; go on with: {again}"
                raise KeyboardInterrupt(interrupts.words) from None
    results = _results(folder)
    with lost_if_refused():
        print(results)
    return 0


def _results(folder: RunFolder) -> str:
    """The lines that end a run: what it gained, where its results are, and the next command."""
    run, page = read_run(folder.path), folder.path / REPORT_FILE
    lines = []
    if gain := run.gain:
        before, after = (run.shown[name].reward_mean for name in ("base", "final"))
        error = "" if gain.stderr is None else f" ± {digits(gain.stderr)}"
        improved = f"{gain.gained} of {len(gain.differences)} held-out prompts improved"
        lines.append(f"held-out reward: {digits(before)} → {digits(after)} ({signed(gain.mean)}{error}); {improved}")
    written = page if page.is_file() else f"not written; solrl report {folder.path} writes it"
    lines += [
        f"LoRA:    {folder.lora}  (pipeline.load_lora_weights of diffusers)",
        f"report:  {written}",
        f"summary: {folder.path / SUMMARY_FILE}",
        f"next:    solrl export {folder.path} --format comfyui, or more iterations: "
        f"{folder.resume_command()} --set run.iterations={2 * run.config.run.iterations}",
    ]
    return "\n".join(lines)


def concluded(folder: RunFolder) -> bool:
    """True if the run has done all iterations of its configuration, and its result files exist unchanged.

    Raises UserError if a file of the run, or every checkpoint, is damaged.
    """
    if not (folder.lora / LORA_FILE).is_file():
        return False
    run = read_run(folder.path)
    if run.summary is None or not unchanged(folder.path, f"{folder.lora.name}/{LORA_FILE}", run.summary):
        return False  # the results were not completely written, or have to be written again
    return newest_state(folder.checkpoints(), folder.path)[0] == run.config.run.iterations


def _copy_end(config: Config, folder: RunFolder) -> None:
    """Copy the run's results to `checkpoints.upload`, in case the run was interrupted before it did."""
    if config.checkpoints.upload:
        uploader = Uploader(folder.path, config.checkpoints, print)
        uploader.submit(folder.checkpoint(config.run.iterations))
        uploader.close(seconds=config.fleet.deadlines.upload)


def _work(
    config: Config,
    folder: RunFolder,
    stack: ExitStack,
    *,
    address: str | None,
    view: LiveView,
    facts: ModelFacts | None,
    classes: ActorClasses,
) -> None:
    path = folder.path.absolute()
    stack.enter_context(ray_messages.kept_in(path / RAY_LOG))
    if not stack.enter_context(joined(address, job=config.run.name, tell=True)):
        stack.callback(release_placement_groups, namespace(path))
    capacity.await_resources(config)
    config = on_its_cards(with_tier(config), facts, folder)
    try_own_rewards(config, elsewhere=bool(address or os.environ.get("RAY_ADDRESS")))
    stack.enter_context(view)
    folder.lock.release()  # the controller claims it, as the process that writes
    actor = on_this_node(ControllerActor, CONTROLLER, namespace(path))
    controller = actor.remote(located(config), path, classes)
    stack.callback(ray.kill, controller)  # and with it all actors that it owns
    follow(controller, view, config, again=f"go on with: {folder.resume_command(address)}")


def resources(config: Config, address: str) -> None:
    """Print a table of the resources that the run requests and those that the cluster at `address` has.

    Raises UserError if something is missing, and as `connect.join`.
    """
    with joined(address, tell=True):
        fits = capacity.survey(config)
        print(placement.table(fits), flush=True)
        if any(entry.missing for entry in fits):
            raise UserError(capacity.diagnosis(fits))


def with_tier(config: Config) -> Config:
    """The configuration with the explorers' actual precision tier: `auto` is resolved, any other tier is checked.

    Raises UserError if an explorer's device lacks the tier.
    """
    wanted = pool_sampling(config).tier
    tier, device = _tier_on(config, config.fleet.explorers)
    if tier != wanted:
        print(f"rollout.explore.precision {wanted} is {tier} on {device}", flush=True)
        config = config.changed({"rollout.explore.precision": tier})
    return config


def on_its_cards(config: Config, facts: ModelFacts | None, folder: RunFolder) -> Config:
    """The configuration with the settings that depend on the GPUs resolved. Those that affect the LoRA digest are
    written to `config.yaml`.

    Raises UserError as `fitting.resolve_auto`.
    """
    given, learner = config, config.fleet.learners
    if facts is not None and fitting.is_open(config):
        config = fitting.resolve_auto(config, facts, _on_node_of(learner, config, "reading the learners' GPU", card))
        if config.fleet.offload and not given.fleet.offload:
            print("fleet.offload null is true: frozen layers are moved to host memory while explorers work", flush=True)
    if compiled_learner.is_open(given):
        kept = compiled_learner.activation_memory(config)
        config = compiled_learner.keeping(config, kept)
        print(f"learner.activation_memory null is {kept:g}", flush=True)
        if config.learner.micro_batch != given.learner.micro_batch:
            print(f"learner.micro_batch {given.learner.micro_batch} is {config.learner.micro_batch}", flush=True)
        what, seconds = f"writing {folder.path / 'config.yaml'}", config.fleet.deadlines.checkpoint
        in_time(lambda: folder.settle(config), what=what, seconds=seconds)
    return config


def _tier_on(config: Config, explorer: WorkerResources) -> tuple[str, str]:
    """`settle_tier`, run with an explorer's resources on a node where one would run."""
    if not explorer.num_gpus:
        return settle_tier(config, explorer)
    tier = _on_node_of(explorer, config, "the test of the explorers' tiers", settle_tier, config, explorer)
    return cast(tuple[str, str], tier)


def _on_node_of(
    worker: WorkerResources, config: Config, what: str, function: Callable[..., Any], *arguments: Any
) -> Any:
    """Run a function with a worker's resources on a node where such a worker would run; returns its result.

    `what`: name of the wait, for errors.
    """
    options: dict[str, Any] = {"num_cpus": worker.num_cpus, "num_gpus": worker.num_gpus, **where(worker)}
    return wait.get(ray.remote(**options)(function).remote(*arguments), what=what, seconds=config.fleet.deadlines.start)


def try_own_rewards(config: Config, *, elsewhere: bool) -> None:
    """Try custom rewards where explorers will run, if that is on a GPU or possibly on another machine.

    Raises UserError with the traceback if one fails.
    """
    explorer = config.fleet.explorers
    own = {f"rewards.{i}.kind": reward for i, reward in enumerate(config.rewards) if ":" in reward.kind}
    if own and (explorer.num_gpus or elsewhere):
        tried, device = trial.prompts_of(config), str(device_of(explorer.num_gpus))
        trials = [trial.Trial(key, reward, scored(config), *tried) for key, reward in own.items()]
        _on_node_of(explorer, config, "the trial of the rewards on a worker", trial.here, trials, device)


def located(config: Config) -> Config:
    """The configuration with absolute local paths: the working folder of actors is not that of the user."""
    upload = config.checkpoints.upload
    if upload and "://" not in upload:
        upload = str(files.located(upload, "checkpoints.upload").absolute())
    return config.changed(
        {
            "rewards": [_absolute(reward, "path", "base") for reward in config.rewards],
            "prompts": _absolute(config.prompts, "train", "heldout"),
            "model": _absolute(config.model, "path", "preview_decoder"),
            "checkpoints.upload": upload,
        }
    )


def _absolute(section: Section, *keys: str) -> Section:
    return section.changed({key: absolute(getattr(section, key)) for key in keys})


def follow(controller: Any, view: LiveView, config: Config, *, again: str) -> None:
    """Show progress until the run has ended. Raises the error that ended it, or RunError if the controller is gone or
    does not answer.

    A progress request without an answer is repeated: only the call of `run` shows that the run has ended.

    `again`: command or hint to continue, for these errors.
    """
    run, unanswered = controller.run.remote(), 0
    while True:
        try:
            ray.get(run, timeout=REFRESH_SECONDS)
            break
        except RayTaskError as error:  # first, because it is also an instance of the class of its cause
            try:
                _show(controller, view, config)  # shows the last events before the error
            finally:
                raise wait.translated(error, "the run") from error
        except GetTimeoutError:
            pass
        except RayError as error:
            raise RunError(f"the controller is gone: {wait.first_line(error)}; {again}") from error
        unanswered = 0 if _show(controller, view, config) else unanswered + 1
        if unanswered == UNANSWERED:
            raise RunError(f"the controller did not answer {UNANSWERED} requests for progress; {again}")
    _show(controller, view, config)


def _show(controller: Any, view: LiveView, config: Config) -> bool:
    """Show the current progress; returns False if the controller did not answer."""
    seconds = config.fleet.deadlines.start
    try:
        progress = wait.get(controller.progress.remote(view.seen), what="the controller's progress", seconds=seconds)
    except WorkerGone:
        return False
    view.update(progress)
    return True
