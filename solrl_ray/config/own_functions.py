"""The user's own functions that a configuration names, and their files, which are sent to workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    digest: str
    """Digest of its files in the configuration; empty: not written yet."""
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
            yield OwnFunction(f"rewards.{position}.kind", reward.kind, reward.code, reward._own)
    evaluation = config.evaluation
    if evaluation.reference:
        yield OwnFunction("evaluation.reference", evaluation.reference, evaluation.reference_code, evaluation._own)


def attached(
    config: Config, sources: Sources | None = None, folders: Sequence[Path] = (), *, resumed: bool = False
) -> Config:
    """`config` with the files of its functions, and their digests.

    Args:
        folders: run folders. A file with a given digest is taken from one of them if the user's has changed or is gone.
        resumed: the run's digest counts, whatever is given; see `inherit_from`.

    Raises UserError: a function whose file or module is missing, or has changed since its digest was written; two
    functions that import modules of one name and different texts.
    """
    sources, codes = sources or Sources(), dict[str, OwnCode | None]()
    for function in of(config):
        codes[function.key] = function.code or _found(function, sources, folders, resumed)
    _check_helpers(codes, sources)
    rewards = [_with(reward, codes.get(f"rewards.{i}.kind")) for i, reward in enumerate(config.rewards)]
    evaluation = _with(config.evaluation, codes.get("evaluation.reference"), "reference_code")
    return config.model_copy(update={"rewards": rewards, "evaluation": evaluation})


def changed(config: Config) -> list[str]:
    """A sentence for each function whose files at the user's path are not the attached ones."""
    said = []
    for function in (function for function in of(config) if function.code):
        with suppress(UserError):  # it is missing
            there = own_code.find(function.spec, function.key)
            if there is not None and there.digest == function.digest:
                continue
        said.append(
            f"{function.spec} has changed since the run began, or is missing; the run continues with the original."
        )
    return said


def store(config: Config, run_folder: Path) -> None:
    """Write the attached files to a run folder."""
    for function in of(config):
        if function.code:
            own_code.write(function.code, run_folder / FOLDER)


def inherit_from(given: Config, was: Config) -> Config:
    """`given` with the digests that the run wrote when it began, for functions with the same name."""
    rewards = list(given.rewards)
    for position, (now, before) in enumerate(zip(given.rewards, was.rewards, strict=False)):
        if now.kind == before.kind and not now.code:
            rewards[position] = now.model_copy(update={"code": before.code})
    evaluation = given.evaluation
    if evaluation.reference == was.evaluation.reference and not evaluation.reference_code:
        evaluation = evaluation.model_copy(update={"reference_code": was.evaluation.reference_code})
    return given.model_copy(update={"rewards": rewards, "evaluation": evaluation})


def _found(function: OwnFunction, sources: Sources, folders: Sequence[Path], resumed: bool) -> OwnCode | None:
    key = sources.named(function.key)
    if function.digest:
        with suppress(UserError):  # the user's own first: data that they read may lie beside them
            code = own_code.find(function.spec, key)
            if code and code.digest == function.digest:
                return code
        stored = (own_code.read(function.digest, function.spec, folder / FOLDER) for folder in folders)
        if code := next(filter(None, stored), None):
            return code
    code = own_code.find(function.spec, key)
    if function.digest and (code is None or code.digest != function.digest):
        field = function.key.replace(".kind", ".code").replace(".reference", ".reference_code")
        other = "" if resumed else f", or set {field} to '' for the present ones"
        raise UserError(
            f"{field} is {function.digest[:12]}… ({sources.of(field)}), but the files of {function.spec} have changed "
            f"since it was written down; bring them back{other}."
        )
    return code


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


def _with(section: T, code: OwnCode | None, field: str = "code") -> T:
    if code is None:
        return section
    section = section.model_copy(update={field: code.digest})
    section._own = code
    return section
