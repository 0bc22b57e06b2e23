"""What is needed of a model family before its libraries are imported: one `Family` in the family's own file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from solrl_ray.config.guidance import Cfg
from solrl_ray.config.schema import Model
from solrl_ray.models.sizes import FamilySizes
from solrl_ray.policy.tool_names import ToolNames
from solrl_ray.records import SampleShape

if TYPE_CHECKING:
    from solrl_ray.models.base import DiffusionModel

MEGAPIXEL = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The row of a family in `models.FAMILIES`."""

    model: type[DiffusionModel]
    """Its class."""
    stock_arguments: Callable[[Model], dict[str, Any]]
    """What switches off classifier-free guidance and changes to the prompt in a call of the stock pipeline."""
    convolutions: tuple[str, ...] = ()
    """Path endings of linears that are 1×1 convolutions in the checkpoint and in its LoRA files."""
    pipeline: str = "DiffusionPipeline"
    """The diffusers class that loads the stock pipeline; this one takes the class that the checkpoint names."""
    frames: str = "num_frames"
    """The argument of the stock call for frames of a video."""
    cfg_arguments: Callable[[Cfg], dict[str, Any]] | None = None
    """What switches guidance on in such a call; None: the family has none."""
    embeds_guidance: bool = False
    """Whether its transformers may take the value of a guidance embedding."""
    keeps_references: Callable[[SampleShape], bool] = lambda shape: True
    """Whether its stock pipeline takes reference pictures of this size as they are."""
    tool_names: ToolNames | None = None
    """Names of its LoRA modules in files of ComfyUI and kohya's scripts; None: these do not have its models."""
    distilled: frozenset[str] = frozenset()
    """Ids of checkpoints with built-in guidance. Other files do not tell, except FLUX.2's index."""

    @property
    def sizes(self) -> FamilySizes:
        return self.model.SIZES


def scale_1(model: Model) -> dict[str, Any]:
    """`Family.stock_arguments` of a pipeline that guides by ``guidance_scale``."""
    return {"guidance_scale": 1.0}


def true_scale_1(model: Model) -> dict[str, Any]:
    """`Family.stock_arguments` of a pipeline that guides by ``true_cfg_scale``."""
    return {"true_cfg_scale": 1.0}


def scale(cfg: Cfg) -> dict[str, Any]:
    """`Family.cfg_arguments` of a pipeline that guides by ``guidance_scale``."""
    return {"guidance_scale": cfg.scale, "negative_prompt": cfg.negative_prompt}


def true_scale(cfg: Cfg) -> dict[str, Any]:
    """`Family.cfg_arguments` of a pipeline that guides by ``true_cfg_scale``."""
    return {"true_cfg_scale": cfg.scale, "negative_prompt": cfg.negative_prompt}
