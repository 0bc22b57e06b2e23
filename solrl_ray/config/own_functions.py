"""The user's functions named in a configuration, and their source files, which are sent to workers."""

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
"""Folder of the source files, inside the run folder."""


@dataclass(frozen=True, slots=True)
class OwnFunction:
    key: str
    spec: str
    code: OwnCode | None
    """Source files of the function, if they are attached."""


@dataclass(frozen=True, slots=True)
class Trial:
    key: str
    """Key and source of the function for messages, such as ``rewards.0.kind (--set)``."""
    config: RewardConfig | EvaluationConfig
    """Section that names the function: a reward, or `evaluation` with its `reference`."""
    shapes: tuple[SampleShape, ...]
    """Shapes of the images that the function will get; all images of one call have the same shape."""
    prompts: tuple[str, str]
    """One prompt per image. They are prompts of the run, because a function may not understand others."""
    files: tuple[tuple[bytes, ...], ...] = ()
    """Contents of each prompt's reference image files, if the model takes reference images."""

    @property
    def spec(self) -> str:
        return self.config.kind if isinstance(self.config, RewardConfig) else self.config.reference


def is_shipped(spec: str) -> bool:
    """Whether the function belongs to this package. Such functions need no trial in a child process."""
    return spec.startswith("solrl_ray.")


def of(config: Config) -> Iterator[OwnFunction]:
    """The functions named in `config`, including functions of installed modules."""
    for position, reward in enumerate(config.rewards):
        if ":" in reward.kind:
            yield OwnFunction(f"rewards.{position}.kind", reward.kind, reward._own)
    evaluation = config.evaluation
    if evaluation.reference:
        yield OwnFunction("evaluation.reference", evaluation.reference, evaluation._own)


def attached(config: Config, sources: Sources | None = None, *, resumed: Path | None = None) -> Config:
    """`config` with the source files of its functions.

    Args:
        resumed: Folder of the run to resume. The run continues with its stored files.

    Raises UserError: A function's file or module is missing, or two functions import different modules with the same
    name.
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
    present = _present(spec, key)  # preferred if unchanged: the functions may read data files beside them
    return present if present and present.texts == stored.texts else stored


def _present(spec: str, key: str) -> OwnCode | None:
    """Source files at the user's path; None if they are missing or not Python."""
    with suppress(UserError):
        return own_code.find(spec, key)
    return None


def changes(config: Config, run: Path, uses: str) -> list[str]:
    """A sentence for each function whose files at the user's path differ from the run's copy.

    `uses`: clause for the message that tells which of the two versions the command uses.
    """
    sentences = []
    named = (function for function in of(config) if not own_code.is_by_value(function.spec))
    for spec, key in dict.fromkeys((function.spec, function.key) for function in named):
        if stored := own_code.read(spec, run / FOLDER):
            present = _present(spec, key)
            now, was = present.texts if present else {}, stored.texts
            if names := sorted(name for name in now.keys() | was.keys() if now.get(name) != was.get(name)):
                sentences.append(
                    f"{spec} has changed since the run began ({', '.join(names)}); {uses}. The run's copy is "
                    f"{run / FOLDER / stored.entry}."
                )
    return sentences


def check_owner(config: Config, run: Path, sources: Sources) -> None:
    """Raise UserError if a function's source files are in the folder of a run that the command only reads."""
    for function in of(config):
        for file in function.code.files if function.code else ():
            if Path(file.path).resolve().is_relative_to(run.resolve()):
                raise UserError(
                    f"{sources.named(function.key)} is {function.spec!r}, a file in the run folder; files there are "
                    "not executed. Copy it elsewhere and name the copy."
                )


def store(config: Config, run_folder: Path) -> None:
    """Write the attached source files to a run folder."""
    for function in of(config):
        if function.code:
            own_code.write(function.code, run_folder / FOLDER)


def _check_helpers(codes: Mapping[str, OwnCode | None], sources: Sources) -> None:
    """Reject functions that import different modules with the same name: a process can load only one of them."""
    attached_codes = [(key, code) for key, code in codes.items() if code]
    for (one, first), (other, second) in combinations(attached_codes, 2):
        known = {file.module: file for file in first.files}
        for file in second.files:
            same = known.get(file.module, file)
            # Entry modules may share a name: they are imported at once.
            if same.text != file.text and not file.module == first.entry == second.entry:
                raise UserError(
                    f"{one} ({sources.of(one)}) and {other} ({sources.of(other)}) both import a module {file.module}, "
                    f"but {same.path} and {file.path} differ, and a process can load only one module of that name; "
                    "rename one of them."
                )


def with_code(section: T, code: OwnCode | None) -> T:
    """The section with the source files of its function attached; unchanged if `code` is None."""
    if code is None:
        return section
    section = section.model_copy()
    section._own = code
    return section
