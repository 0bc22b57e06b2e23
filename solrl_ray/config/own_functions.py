"""The user's own functions that a configuration names, and their files, which are sent to workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TypeVar

from solrl_ray.common import own_code
from solrl_ray.common.own_code import OwnCode
from solrl_ray.config.loading import Sources
from solrl_ray.config.rewards import RewardConfig
from solrl_ray.config.schema import Config, EvaluationConfig
from solrl_ray.errors import UserError
from solrl_ray.records import SampleShape

T = TypeVar("T", RewardConfig, EvaluationConfig)
FOLDER = "code"
"""Their folder in a run folder."""


@dataclass(frozen=True, slots=True)
class OwnFunction:
    key: str
    spec: str
    code: OwnCode | None
    """Its files, if they are attached."""


@dataclass(frozen=True, slots=True)
class Trial:
    key: str
    """The source to name in a message, such as ``rewards.0.kind (--set)``."""
    config: RewardConfig | EvaluationConfig
    """The section that names it: a reward, or `evaluation.reference`."""
    shapes: tuple[SampleShape, ...]
    """Of the pictures that it will get; a call's are of one."""
    prompts: tuple[str, str]
    """One for each picture: the run's own, because a function may not understand others."""
    files: tuple[tuple[bytes, ...], ...] = ()
    """The contents of each prompt's reference pictures, if the model takes some."""

    @property
    def spec(self) -> str:
        return self.config.kind if isinstance(self.config, RewardConfig) else self.config.reference


def is_shipped(spec: str) -> bool:
    """Whether it is a function of this package, which need not be tried in a child process."""
    return spec.startswith("solrl_ray.")


def of(config: Config) -> Iterator[OwnFunction]:
    """The functions that `config` names, including those of installed modules."""
    for position, reward in enumerate(config.rewards):
        if ":" in reward.kind:
            yield OwnFunction(f"rewards.{position}.kind", reward.kind, reward._own)
    evaluation = config.evaluation
    if evaluation.reference:
        yield OwnFunction("evaluation.reference", evaluation.reference, evaluation._own)


def attached(config: Config, sources: Sources | None = None, *, resumed: Path | None = None) -> Config:
    """`config` with the files of its functions.

    Args:
        resumed: the folder of a run that goes on with the files that it began with, which it has stored.

    Raises UserError: a function whose file or module is missing; two functions that import modules of one name and
    different texts.
    """
    sources, codes = sources or Sources(), dict[str, OwnCode | None]()
    for function in of(config):
        codes[function.key] = function.code or _found(function.spec, sources.named(function.key), resumed)
    _check_helpers(codes, sources)
    rewards = [with_code(reward, codes.get(f"rewards.{i}.kind")) for i, reward in enumerate(config.rewards)]
    evaluation = with_code(config.evaluation, codes.get("evaluation.reference"))
    return config.model_copy(update={"rewards": rewards, "evaluation": evaluation})


def _found(spec: str, key: str, run: Path | None) -> OwnCode | None:
    stored = own_code.read(spec, run / FOLDER) if run else None
    if stored is None:
        return own_code.find(spec, key)
    present = _present(spec, key)  # where data that they read may lie beside them
    return present if present and present.texts == stored.texts else stored


def _present(spec: str, key: str) -> OwnCode | None:
    """The files at the user's path; None if they are missing or not Python."""
    with suppress(UserError):
        return own_code.find(spec, key)
    return None


def changes(config: Config, run: Path, uses: str) -> list[str]:
    """A sentence for each function whose files at the user's path are not those that the run began with.

    `uses`: which of both the command uses.
    """
    said = []
    named = (function for function in of(config) if not own_code.is_by_value(function.spec))
    for spec, key in dict.fromkeys((function.spec, function.key) for function in named):
        if stored := own_code.read(spec, run / FOLDER):
            present = _present(spec, key)
            now, was = present.texts if present else {}, stored.texts
            if names := sorted(name for name in now.keys() | was.keys() if now.get(name) != was.get(name)):
                said.append(
                    f"{spec} has changed since the run began ({', '.join(names)}); {uses}. The run's copy is "
                    f"{run / FOLDER / stored.entry}."
                )
    return said


def check_owner(config: Config, run: Path, sources: Sources) -> None:
    """Raise UserError if a function's files lie in the folder of a run that is only read."""
    for function in of(config):
        for file in function.code.files if function.code else ():
            if Path(file.path).resolve().is_relative_to(run.resolve()):
                raise UserError(
                    f"{sources.named(function.key)} is {function.spec!r}, a file of the run folder, which is not "
                    "executed; copy it elsewhere and name the copy."
                )


def store(config: Config, run_folder: Path) -> None:
    """Write the attached files to a run folder."""
    for function in of(config):
        if function.code:
            own_code.write(function.code, run_folder / FOLDER)


def _check_helpers(codes: Mapping[str, OwnCode | None], sources: Sources) -> None:
    """Refuse functions of which one would import the other's module: a process has one module of a name."""
    there = [(key, code) for key, code in codes.items() if code]
    for (one, first), (other, second) in combinations(there, 2):
        known = {file.module: file for file in first.files}
        for file in second.files:
            same = known.get(file.module, file)
            if (
                same.text != file.text and not file.module == first.entry == second.entry
            ):  # entries are imported at once
                raise UserError(
                    f"{one} ({sources.of(one)}) and {other} ({sources.of(other)}) both have a module {file.module}, "
                    f"but {same.path} and {file.path} differ, and a process has one module of a name; rename one."
                )


def with_code(section: T, code: OwnCode | None) -> T:
    """The section with the code of its function; unchanged for None."""
    if code is None:
        return section
    section = section.model_copy()
    section._own = code
    return section
