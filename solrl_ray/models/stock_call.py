"""How to call the stock diffusers pipeline so that it computes the same as ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from solrl_ray.models import FAMILIES
from solrl_ray.sampling.drawing import Drawing


@dataclass(frozen=True, slots=True, kw_only=True)
class StockCall(Drawing):
    """Settings to draw samples with the stock pipeline: load it as `pipeline`, use the noise levels of `scheduler`, and
    call it with `call`.
    """

    @property
    def pipeline(self) -> str:
        """The diffusers class that loads it."""
        return FAMILIES[self.model.family].LOADED_BY

    @property
    def call(self) -> dict[str, Any]:
        """Arguments of the stock pipeline besides the prompt. If several sizes are configured, the first one."""
        model, family, shape = self.model, FAMILIES[self.model.family], self.model.shapes[0]
        guided = family.cfg_arguments(model.cfg) if model.cfg.is_on else {}
        grid = {"sigmas": [1 - i / self.steps for i in range(self.steps)]}
        return {
            "height": shape.height,
            "width": shape.width,
            **({family.FRAMES: model.frames} if model.frames else {}),
            "num_inference_steps": self.steps,
            "max_sequence_length": model.max_sequence_length,
            **family.stock_arguments(model),
            **guided,
            **(grid if model.schedule.kind == "linear" else {}),
        }

    @property
    def differs(self) -> str:
        """Differences between the stock pipeline and the run, in sentences; empty if there are none."""
        cfg, shape, differences = self.model.cfg, self.model.shapes[0], list[str]()
        low, high = cfg.interval
        passed = "cfg_truncation" in self.call and high == 1
        if cfg.is_on and (low, high) != (0, 1) and not passed:
            differences.append(
                f"The run guides only at noise levels {low:g} to {high:g}; the stock pipeline has no such setting."
            )
        if self.model.references and not FAMILIES[self.model.family].keeps_references(shape):
            differences.append(
                f"The run uses references of {shape}; the stock pipeline resizes them to about 1024 x 1024 px."
            )
        return " ".join(differences)

    @property
    def shifts_once(self) -> bool:
        """Whether the scheduler must be given noise levels without shift, because it would shift its own twice."""
        return self.model.schedule.kind == "flow_shift"

    @property
    def scheduler(self) -> dict[str, Any]:
        """Arguments of `FlowMatchEulerDiscreteScheduler`, which computes the noise levels. Pipelines compute mu from
        these arguments; FLUX.2's pipeline has its own formula.
        """
        schedule = self.model.schedule
        if schedule.kind in ("linear", "shift", "flow_shift"):
            return {"shift": schedule.shift if schedule.kind != "linear" else 1.0}
        dynamic: dict[str, Any] = {"use_dynamic_shifting": True}
        if schedule.kind == "flux":
            dynamic |= {"base_shift": schedule.base_shift, "max_shift": schedule.max_shift}
            dynamic |= {"base_image_seq_len": schedule.base_tokens, "max_image_seq_len": schedule.max_tokens}
        return dynamic | ({"shift_terminal": schedule.terminal} if schedule.terminal else {})
