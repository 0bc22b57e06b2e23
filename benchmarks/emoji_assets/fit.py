"""A training stage that takes a given time and can be interrupted and resumed.

The learning rate depends on the elapsed training time, not on steps, so that a stage takes its given time on a GPU of
any speed. The stage's file has the optimiser's state and the averaged weights.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

EVERY = 20
"""Steps between checks of the clock and the loss."""
WARM_UP = 200
"""Steps of learning rate warm-up."""


class Unusable(Exception):
    """A stage's result is too bad for later stages to be useful."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Settings of a training stage."""

    name: str
    seconds: float
    """Training time over all calls, in seconds."""
    batch: int
    lr: float
    """Peak learning rate."""
    seed: int
    averaging: float = 0.999
    """Decay of the exponential moving average of the weights, which is the stage's result."""
    weight_decay: float = 0.01


class Fit:
    """Trains float32 `modules` with AdamW, starting from the stage's file if it exists."""

    def __init__(self, stage: Stage, modules: Mapping[str, nn.Module], folder: Path, device: torch.device) -> None:
        self.stage, self._file, self._device = stage, folder / f"{stage.name}.pt", device
        self._curve = folder / f"{stage.name}.jsonl"
        self._parameters: list[Tensor] = [
            p for module in modules.values() for p in module.parameters() if p.requires_grad
        ]
        self._average = [p.detach().clone() for p in self._parameters]
        fused = device.type == "cuda"
        self._adamw = torch.optim.AdamW(
            self._parameters, lr=stage.lr, weight_decay=stage.weight_decay, betas=(0.9, 0.99), fused=fused
        )
        self.steps, self.spent, self.loss = 0, 0.0, math.nan
        if self._file.exists():
            self._load()

    @property
    def done(self) -> bool:
        return self.spent >= self.stage.seconds

    def run(self, loss: Callable[[torch.Generator], Tensor], until: float) -> None:
        """Minimise `loss(generator)` until the stage is done or `time.monotonic()` is `until`; then save.

        Takes at least a few steps. Afterwards the modules have the averaged weights. Raises RuntimeError if the loss is
        not finite.
        """
        generator = torch.Generator(self._device).manual_seed(self.stage.seed + 1_000_003 * self.steps)
        self._step(loss(generator)).item()  # compiles, so that compiling does not count as training time
        last = time.monotonic()
        while True:
            mean = torch.stack([self._step(loss(generator)) for _ in range(EVERY)]).mean().item()
            if not math.isfinite(mean):
                raise RuntimeError(f"the loss of {self.stage.name} is {mean} at step {self.steps}")
            self.loss = mean if math.isnan(self.loss) else 0.9 * self.loss + 0.1 * mean
            now = time.monotonic()
            self.spent, last = self.spent + now - last, now
            self._note()
            if self.done or now >= until:
                break
        self._save()
        self.use_average()

    def use_average(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, self._average)

    def _step(self, loss: Tensor) -> Tensor:
        progress = min(1.0, self.spent / self.stage.seconds)
        rate = self.stage.lr * min(1.0, (self.steps + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * progress))
        for group in self._adamw.param_groups:
            group["lr"] = rate
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        decay = min(self.stage.averaging, (1 + self.steps) / (10 + self.steps))
        with torch.no_grad():
            torch._foreach_lerp_(self._average, [p.detach() for p in self._parameters], 1 - decay)
        self.steps += 1
        return loss.detach()

    def _note(self) -> None:
        if self.steps // EVERY % 10 == 0 or self.done:
            line = {"step": self.steps, "seconds": round(self.spent, 1), "loss": round(self.loss, 5)}
            with self._curve.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(self.stage.name, json.dumps(line), flush=True)

    def _save(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "steps": self.steps,
            "spent": self.spent,
            "loss": self.loss,
            "average": self._average,
            # A finished stage needs only its result.
            "weights": [] if self.done else [p.detach() for p in self._parameters],
            "adamw": {} if self.done else self._adamw.state_dict(),
        }
        partial = self._file.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self._file)

    def _load(self) -> None:
        state = torch.load(self._file, map_location=self._device, weights_only=True)
        self.steps, self.spent, self.loss = state["steps"], state["spent"], state["loss"]
        with torch.no_grad():
            torch._foreach_copy_(self._average, state["average"])
            torch._foreach_copy_(self._parameters, state["weights"] or state["average"])
        if state["adamw"]:
            self._adamw.load_state_dict(state["adamw"])


def command(parser: argparse.ArgumentParser, build: Callable[[argparse.Namespace], Any], last: float = 0.0) -> int:
    """Command line of a builder, which may take several calls to finish; returns the exit status.

    Args:
        build: returns an object with ``run(until)``, which returns True when all is done, and ``write(done)``.
        last: seconds of `--seconds` reserved for writing.
    """
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--device", type=torch.device, default="cuda")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.seconds - last
    # cuDNN's attention has failed in training (illegal memory access on an H200, torch 2.11).
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_float32_matmul_precision("high")
    building = build(arguments)
    try:
        done = building.run(until)
    except Unusable as reason:
        building.write(False)
        print(reason, file=sys.stderr)
        return 1
    building.write(done)
    print("all is done" if done else "not done yet: run the same command again to continue", flush=True)
    return 0
