"""All steps of a validation, in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from solrl_ray.config.schema import Config
from solrl_ray.quantization.capability import QUANTIZED_TIERS
from solrl_ray.validation import against_stock, policy, report, sampling
from solrl_ray.validation.outcomes import Outcome
from solrl_ray.validation.session import Session
from solrl_ray.validation.steps import Step, run


def steps(session: Session) -> list[Step]:
    """The steps for the model, in order."""

    def of(name: str, does: str, work: Callable[[Session], list], *needs: str) -> Step:  # type: ignore[type-arg]
        return Step(name, does, partial(work, session), needs)

    return [
        of("text", "encode prompts", against_stock.text),
        of("stock", "draw a picture with the stock diffusers pipeline", against_stock.stock_picture),
        of("load", "load transformer and decoder", against_stock.load),
        of("forward", "velocities beside the stock pipeline's", against_stock.forward, "text", "stock", "load"),
        of("picture", "a picture beside the stock pipeline's", against_stock.picture, "text", "stock", "load"),
        of("regenerate", "sample chosen seeds twice, preview in full precision", sampling.regenerate, "text", "load"),
        *(
            of(
                f"preview {tier}",
                f"quantise, attest, preview in {tier}",
                partial(sampling.preview, tier=tier),
                "regenerate",
            )
            for tier in QUANTIZED_TIERS
        ),
        of("revision", "publish, swap, prove", policy.revision, "text"),
        of("update", "one update of the policy", policy.update, "regenerate"),
    ]


def validate(
    config: Config,
    device: torch.device,
    folder: Path,
    *,
    solver_steps: int,
    seconds: float,
    command: Sequence[str],
    tell: Callable[[str], None],
    stock_path: str = "",
) -> tuple[list[Outcome], Path]:
    """Do every step on `device`, report each at once, and write the report.

    Args:
        folder: of the report; it is made if needed.
        solver_steps: of the comparison with the stock pipeline and of previews.
        seconds: deadline of each step.
        command: the command to state in the report.
        stock_path: the checkpoint of the stock pipeline; empty: the configured one.

    Returns:
        The outcome of each step, and the page's path.
    """
    session = Session(config, device, solver_steps, stock_path or config.model.path)
    outcomes = []
    planned = steps(session)
    tell(f"{len(planned)} steps, of at most {seconds:g} s each; first: {planned[0].name}, {planned[0].does}")
    for number, outcome in enumerate(run(planned, device, seconds), start=1):
        outcomes.append(outcome)
        tell(outcome.line)
        for following in planned[number : number + 1]:
            tell(f"{following.name}: {following.does} …")
    machine = report.Machine.here(device)
    return outcomes, report.write(folder, config, machine, outcomes, session.pictures, command)
