"""The Python interface: plan, train and resume a run from a script or a notebook.

    plan("flux1_dev_80gb", gpu="h100-80")          what fits and how long it takes
    run = train("demo", rewards=[redness])         the same checks, run folder and digests as `solrl train`
    run = resume(run)                              after an interruption, or with more iterations

An error is an exception with the sentence that the command would print. Nothing here imports PyTorch or Ray before a
run or a plan needs it.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

from solrl_ray.cli import configured, preflight
from solrl_ray.cli.preflight import Run as Checked
from solrl_ray.common import interrupts, own_code, ray_auth, system_package
from solrl_ray.common.files import located, make_folder, replace_file
from solrl_ray.config import named, own_functions
from solrl_ray.config.loading import LoadedConfig, load_with_sources
from solrl_ray.errors import RunError, UserError
from solrl_ray.metrics.records import EvaluationMetrics, IterationMetrics
from solrl_ray.storage.run_folder import PLAN_FILE, RunFolder

Preset = str | os.PathLike[str]
Callback = Callable[["Run", IterationMetrics], object]
_TRAINING = threading.Lock()
"""Held while a run of this process trains. A second one would share its Ray, which ends with the first."""
_BUSY = "A run trains in this process already; wait for it with run.wait(), or end it with run.stop()."
PROMPT_COLUMNS = ("prompt", "text", "caption")
"""Columns of a table that hold its prompts; the first one found counts."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan:
    """What a run would do, need and take. Prints as text; Jupyter shows it as HTML."""

    verdict: str
    """One line, such as ``fits: about 61 min for 200 iterations on 1 × NVIDIA H100 80GB; peak 56.9 of 85.5 GB``."""
    summary: str
    """The verdict and the main rows, as `solrl plan` prints them."""
    text: str
    """Every row, as `solrl plan -v` prints them."""
    fits: bool | None
    """Whether the run fits the GPU; None if no GPU was named, or its memory or the model's is unknown."""
    problem: str = ""
    """Why it does not fit, and what would help; empty if it fits."""
    hours: float | None = None
    """Hours of all iterations, without start and evaluations; None without measured times of the model."""
    peak_gb: float | None = None
    """The most memory that one GPU holds, estimated, in units of 1e9 bytes; None if unknown."""

    def __str__(self) -> str:
        return f"{self.summary}\n{self.problem}".rstrip()

    __repr__ = __str__  # what a notebook shows without HTML

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


@dataclass(eq=False)
class Run:
    """A run that was started from Python, or is resumed; everything it made is in its folder."""

    folder: Path
    """The run folder."""
    error: BaseException | None = None
    """What ended a run in the background, if it failed."""
    _stopping: threading.Event = field(default_factory=threading.Event, repr=False)
    _thread: threading.Thread | None = field(default=None, repr=False)

    @property
    def lora(self) -> Path:
        """The folder with the trained LoRA: ``pipeline.load_lora_weights(run.lora)``. It exists after the last
        iteration; before, `solrl export` writes the LoRA of any checkpoint.
        """
        return RunFolder(self.folder).lora

    @property
    def running(self) -> bool:
        """True while it trains in the background (``train(block=False)``)."""
        return self._thread is not None and self._thread.is_alive()

    def metrics(self) -> Any:
        """The metrics of all iterations so far: a pandas DataFrame if pandas is installed, else a list of mappings.

        Columns are the fields of `IterationMetrics`; times by stage are ``seconds.explore`` and so on.
        """
        return _table(record for record in self._records() if isinstance(record, IterationMetrics))

    def evaluations(self) -> Any:
        """All evaluations on held-out prompts so far, one row per policy and time, as `metrics`."""
        return _table(record for record in self._records() if isinstance(record, EvaluationMetrics))

    def _records(self) -> list[Any]:
        folder = RunFolder(self.folder)
        return list(folder.read_metrics()) if folder.metrics.is_file() else []

    def report(self) -> Path:
        """Write the report again; returns the path of the HTML page."""
        from solrl_ray.report.page import build

        return Path(build(self.folder))

    def stop(self) -> None:
        """End the run as Ctrl-C does, within seconds; `resume` continues it. For callbacks and background runs."""
        self._stopping.set()

    def wait(self, timeout: float | None = None) -> Run:
        """Wait for a background run.

        Raises the error that ended it; TimeoutError after `timeout` seconds.
        """
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"{self.folder} still trains after {timeout:g} s")
        if self.error is not None:
            raise self.error
        return self


def plan(
    *presets: Preset,
    gpu: str = "",
    overrides: Mapping[str, Any] | None = None,
    rewards: Sequence[Any] | None = None,
    prompts: Any = None,
    heldout: Any = None,
) -> Plan:
    """What a run would do, whether it fits a GPU, and how long it takes there; starts nothing.

    Args:
        presets: names and YAML files as on the command line, such as ``"flux1_dev_80gb"``.
        gpu: the type of GPU, such as ``"h100-80"``; without it no times and no verdict.
        overrides: as in `train`, and likewise `rewards`, `prompts`, `heldout`.

    Raises UserError for bad input. A run that does not fit is no error: see `Plan.problem`.
    """
    from solrl_ray.cli.planned import on_cluster, planned
    from solrl_ray.planning.prices import cluster_of

    loaded = _load(presets, overrides, rewards, prompts, heldout)
    preflight.check(Checked(loaded.config, loaded.sources), "configuration")
    cluster = cluster_of(None, gpu) if gpu else None
    if cluster:
        loaded = on_cluster(loaded, cluster)
    checked = Checked(loaded.config, loaded.sources, planned=True, elsewhere=bool(gpu))
    with redirect_stdout(io.StringIO()):  # progress of slow checks
        made = planned(preflight.check(checked, "files"), cluster)
    return Plan(
        verdict=made.verdict,
        summary=made.short(),
        text=made.whole(),
        fits=made.fits,
        problem=str(made.problem or ""),
        hours=made.hours,
        peak_gb=None if made.peak is None else made.peak / 1e9,
    )


def train(
    *presets: Preset,
    overrides: Mapping[str, Any] | None = None,
    rewards: Sequence[Any] | None = None,
    prompts: Any = None,
    heldout: Any = None,
    callbacks: Sequence[Callback] = (),
    address: str | None = None,
    block: bool = True,
    live: bool = True,
) -> Run:
    """Train a LoRA. The run has the checks, the folder and the digests of ``solrl train`` with the same settings.

    Args:
        presets: names and YAML files as on the command line, in any order: ``"demo"``, or ``"flux1_dev", "pickscore"``.
        overrides: key → value, such as ``{"run.iterations": 3}``.
        rewards: in place of the configuration's: functions ``f(images, prompts)``, objects with such a method
            ``compute``, mappings of a reward's keys, or names of reward presets. A function may be from a notebook
            cell: it travels by value, with what it refers to.
        prompts: in place of ``prompts.train``: a path, a list of texts, or a `datasets.Dataset` with a column
            ``prompt``, ``text`` or ``caption``.
        heldout: likewise for ``prompts.heldout``.
        callbacks: called as ``callback(run, metrics)`` after each iteration, in this process. What one raises ends the
            run.
        address: the Ray cluster to join; default: RAY_ADDRESS, else a local Ray that ends with the run.
        block: False returns at once and trains in a background thread; see `Run.wait`.
        live: redraw a panel if the output is a terminal; else plain lines.

    Raises UserError for bad input, before anything is started; RunError if the run cannot go on; KeyboardInterrupt on
    Ctrl-C or a notebook's stop button, after the workers have ended. Both of the latter can be resumed.
    """
    loaded = _load(presets, overrides, rewards, prompts, heldout)
    return _start(loaded, resumes=False, callbacks=callbacks, address=address, block=block, live=live)


def resume(
    run: Run | Preset,
    *,
    overrides: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    address: str | None = None,
    block: bool = True,
    live: bool = True,
) -> Run:
    """Continue a run that was interrupted, or, with a larger ``run.iterations``, one that has ended.

    Args:
        run: a `Run` or its folder. Rewards are those that it began with, which its folder has.
        overrides: as in `train`, where a run may change.
        callbacks: as in `train`, and likewise `address`, `block`, `live`.

    Raises as `train`; UserError if the folder is damaged or the change is not allowed.
    """
    folder = run.folder if isinstance(run, Run) else Path(run)
    loaded = configured.resume_folder(folder, [], [], _values(overrides))
    return _start(loaded, resumes=True, callbacks=callbacks, address=address, block=block, live=live)


def _start(
    loaded: LoadedConfig,
    *,
    resumes: bool,
    callbacks: Sequence[Callback],
    address: str | None,
    block: bool,
    live: bool,
) -> Run:
    from solrl_ray.cli.planned import planned

    if _TRAINING.locked():
        raise UserError(_BUSY)
    _settle_libraries()
    system_package.settle()
    run = Run(RunFolder.of(loaded.config).path.absolute())
    joins = address or os.environ.get("RAY_ADDRESS")
    with _signals_kept(), _hidden_main():
        checked = Checked(loaded.config, loaded.sources, address=joins, resumes=resumes)
        made = planned(preflight.check(checked, "configuration", "cards", "folder", "files"))
        print(made.start(str(RunFolder.of(loaded.config).path / PLAN_FILE)), flush=True)
        for warning in made.warnings:
            print(f"warning: {warning}", file=sys.stderr, flush=True)
    ray_auth.settle(local=joins is None)

    def work() -> None:
        try:
            from actors.client import launch
            from solrl_ray.report.live import LiveView

            view: Any = _Watch(LiveView(_console(), plain=not live), run, callbacks)
            launch.train(
                loaded.config,
                resume=resumes,
                address=address,
                view=view,
                facts=made.arithmetic.facts,
                plan=made.whole(),
            )
        except KeyboardInterrupt as interrupt:
            if not run._stopping.is_set():
                raise
            print(f"{interrupt}, or solrl_ray.resume({str(run.folder)!r})", flush=True)
        finally:
            _TRAINING.release()

    def in_background() -> None:
        try:
            work()
        except BaseException as error:  # kept for `wait`, whatever it is
            run.error = error
            print(f"error: {error}", file=sys.stderr, flush=True)

    if not _TRAINING.acquire(blocking=False):
        raise UserError(_BUSY)
    if block:
        with _signals_kept():
            work()
        return run
    run._thread = threading.Thread(target=in_background, name=f"run {loaded.config.run.name}", daemon=True)
    run._thread.start()
    return run


def _console() -> Console | None:
    """In a notebook one that prints plain lines: its output claims to be a terminal, which a panel would redraw."""
    return Console(force_jupyter=False, force_terminal=False) if "ipykernel" in sys.modules else None


class _Watch:
    """Shows a run's progress, calls the callbacks for each new iteration, and ends the run if it is told to stop."""

    def __init__(self, view: Any, run: Run, callbacks: Sequence[Callback]) -> None:
        self._view, self._run, self._callbacks = view, run, callbacks
        self._told = max((record.iteration for record in self._iterations()), default=-1)

    def __enter__(self) -> _Watch:
        self._view.__enter__()
        return self

    def __exit__(self, *ended: object) -> None:
        self._view.__exit__(*ended)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)

    def update(self, progress: Any) -> None:
        """Show a snapshot; raises KeyboardInterrupt if the run was told to stop, and what a callback raises."""
        self._view.update(progress)
        if self._callbacks and len(progress.train_rewards) > self._told + 1:
            for record in self._iterations():
                if record.iteration > self._told:
                    self._told = record.iteration
                    for callback in self._callbacks:
                        callback(self._run, record)
        if self._run._stopping.is_set():
            raise KeyboardInterrupt("stopped")

    def _iterations(self) -> list[IterationMetrics]:
        return [record for record in self._run._records() if isinstance(record, IterationMetrics)]


def _load(
    presets: Sequence[Preset], overrides: Mapping[str, Any] | None, rewards: Any, prompts: Any, heldout: Any
) -> LoadedConfig:
    if not presets:
        raise UserError('No preset was named; name at least one, such as "demo"; `solrl list` shows them.')
    given = [Path(preset) for preset in presets]
    values = _values(overrides)
    entries, codes = _rewards(rewards) if rewards is not None else ([], {})
    for entry in entries:  # names of presets, whose entries are those of their files
        if isinstance(entry, Path):
            given.append(entry)
    if sections := [entry for entry in entries if not isinstance(entry, Path)]:
        if len(sections) < len(entries):
            raise UserError("rewards mixes names of presets with functions or mappings; name one preset, or neither.")
        values = {"rewards": ("rewards", sections), **values}  # first, so that overrides of their keys count
    elif rewards is not None and not entries:
        raise UserError("rewards is empty; name at least one reward, or leave it out for the configuration's.")
    files = named.resolve(given)
    root = _root(files, values) if prompts is not None or heldout is not None else Path()
    for key, source in (("prompts.train", prompts), ("prompts.heldout", heldout)):
        if source is not None:
            values[key] = (key.rpartition(".")[2], _prompts(source, key, root))
    loaded = load_with_sources(files, [], values)
    config = loaded.config
    if codes:
        config = config.model_copy(
            update={"rewards": [own_functions.with_code(each, codes.get(each.kind)) for each in config.rewards]}
        )
    return replace(loaded, config=own_functions.attached(config, loaded.sources))


def _root(files: Sequence[Path], values: Mapping[str, tuple[str, Any]]) -> Path:
    """The folder of the configuration's run folders, which stays where a run is resumed."""
    placeholders = {f"prompts.{name}": (name, f"{name}.txt") for name in ("train", "heldout")}
    return located(load_with_sources(files, [], {**placeholders, **values}).config.run.root, "run.root").absolute()


def _values(overrides: Mapping[str, Any] | None) -> dict[str, tuple[str, Any]]:
    """Overrides as options of `load_with_sources`; plain values, as YAML has them."""
    try:
        return {key: ("overrides", json.loads(json.dumps(value))) for key, value in (overrides or {}).items()}
    except (TypeError, ValueError) as error:
        raise UserError(
            f"overrides has a value that is no text, number, truth value, list or mapping: {error}."
        ) from None


def _rewards(rewards: Any) -> tuple[list[Any], dict[str, own_code.OwnCode]]:
    """Entries of the section `rewards`, or paths of presets; and the code of those given as functions, by kind."""
    if isinstance(rewards, str | Mapping) or not isinstance(rewards, Iterable):
        rewards = [rewards]
    entries, codes = list[Any](), dict[str, own_code.OwnCode]()
    for position, reward in enumerate(rewards):
        function = getattr(reward, "compute", reward)
        if isinstance(reward, Mapping):
            entries.append(dict(reward))
        elif isinstance(reward, str):
            entries.append({"kind": reward} if ":" in reward else Path(reward))
        elif callable(function):
            kind, code = own_code.by_value(function, f"rewards[{position}]")
            entries.append({"kind": kind})
            codes[kind] = code
        else:
            raise UserError(
                f"rewards[{position}] is a {type(reward).__name__}; it must be a function of (images, prompts), an "
                "object with such a method `compute`, a mapping of a reward's keys, or the name of a preset."
            )
    return entries, codes


def _prompts(source: Any, key: str, root: Path) -> str:
    """The path of a prompt file; texts are written to one below the run root, which is named by its content."""
    if isinstance(source, str | os.PathLike):
        return str(source)
    columns = getattr(source, "column_names", None)
    if columns is not None:  # of the `datasets` library
        column = next((name for name in PROMPT_COLUMNS if name in columns), None)
        if column is None:
            raise UserError(
                f"{key} is a table with columns {', '.join(columns)}; one must be named {PROMPT_COLUMNS[0]}."
            )
        source = source[column]
    texts = list(source)
    if wrong := next((text for text in texts if not isinstance(text, str)), None):
        raise UserError(f"{key} has an entry of type {type(wrong).__name__}; each prompt must be a text.")
    content = "".join(f"{json.dumps({'text': text}, ensure_ascii=False)}\n" for text in texts).encode()
    file = root / "prompts" / f"{own_code.short_digest(content)}.jsonl"
    try:
        make_folder(file.parent)
        replace_file(file, content)
    except OSError as error:
        raise UserError(
            f"{key} is stored in {file}, which cannot be written: {error.strerror}; set run.root."
        ) from error
    return str(file.absolute())


def _table(records: Iterable[Any]) -> Any:
    rows = []
    for record in records:
        row = dict[str, Any]()
        for name, value in asdict(record).items():
            row |= (
                {f"{name}.{part}": each for part, each in value.items()} if isinstance(value, dict) else {name: value}
            )
        rows.append(row)
    try:
        import pandas
    except ImportError:
        return rows
    return pandas.DataFrame(rows)


def _settle_libraries() -> None:
    """As the command does: quiet imports of transformers, and no environments that Ray builds under `uv run`."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore the handlers of signals of this process, which a run and Ray replace."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        interrupts.forget()
        for number, handler in kept.items():
            if handler is not None:  # set by Python
                signal.signal(number, handler)


@contextmanager
def _hidden_main() -> Iterator[None]:
    """Hide the caller's script from child processes that try a reward: each would execute it again, from its first
    line, unless it has a guard ``if __name__ == "__main__"``.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


__all__ = ["Plan", "Run", "RunError", "UserError", "plan", "resume", "train"]
