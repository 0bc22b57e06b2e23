"""The learner's passes through its transformer: adapters, attention kernel, compilation, activation memory.

::

    base, anchor, old   without gradient      with `compile.learner`, each kind is compiled once per shape of samples;
    default             with gradient         switching adapters does not compile again
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from solrl_ray.config import compiled_learner
from solrl_ray.config.schema import Config
from solrl_ray.models import attention
from solrl_ray.models.base import DiffusionModel
from solrl_ray.models.compilation import compile_learner
from solrl_ray.planning.update import trains_guided_velocity
from solrl_ray.policy import adapters
from solrl_ray.records import PromptEmbedding, SampleShape


class PolicyPasses:
    def __init__(self, config: Config, model: DiffusionModel) -> None:
        """Attach the adapters to `model.transformer` at revision 0, and set up this process for training.

        Raises UserError if the transformer cannot be compiled as configured.
        """
        guidance = config.model if trains_guided_velocity(config) else config.model.unguided
        self._config, self._model = config, model.with_guidance(guidance, together=False)
        self._by_shape = by_shape(self._model, config.model.shapes)
        compiled, kept = compiled_learner.is_compiled(config), compiled_learner.activation_memory(config)
        # cuDNN's attention was measured only in compiled passes on Hopper; eager passes keep their kernels.
        is_measured = model.device.type != "cuda" or torch.cuda.get_device_capability(model.device) == (9, 0)
        cudnn = compiled and model.TRAINS_ON_CUDNN and is_measured and not config.run.deterministic
        attention.choose_for_training(cudnn=cudnn)
        if not compiled and kept == 0:
            model.transformer.enable_gradient_checkpointing()  # type: ignore[operator]
        anchor = config.objective.anchor_decay() is not None
        adapters.attach(model.transformer, config.model.lora, config.run.seed, anchor=anchor)
        self.compiled = compile_learner(model.transformer, config.compile, model.device, kept) if compiled else ""
        """A description of the compiled passes; empty if none is compiled."""

    def velocity(
        self, x_t: torch.Tensor, t: torch.Tensor, embedding: dict[str, torch.Tensor], shape: SampleShape | None = None
    ) -> torch.Tensor:
        """The model's velocity, float32. A bfloat16 base uses autocast, because the factors are float32.

        `shape`: shape of the samples; None: the run's only shape.
        """
        bfloat16 = self._config.model.dtype == "bfloat16"
        with torch.autocast(self._model.device.type, dtype=torch.bfloat16, enabled=bfloat16):
            return self._by_shape[shape].velocity(x_t, t, embedding)

    def warm_up(self, policy: adapters.Active, embedding: PromptEmbedding, shape: SampleShape | None = None) -> None:
        """Run one pass with `policy` on a micro-batch of zeros; the gradient of ``default`` is discarded."""
        model, samples = self._by_shape[shape], self._config.learner.micro_batch
        x_t = torch.zeros(samples, *model.latent_shape, device=model.device)
        t = torch.full((samples,), 0.5, device=model.device)
        trained = policy == adapters.TRAINED
        with adapters.using(model.transformer, policy), torch.set_grad_enabled(trained):
            velocity = self.velocity(x_t, t, model.batch_embeddings([embedding] * samples), shape)
            if trained:
                factors = adapters.parameters(model.transformer, adapters.TRAINED)
                torch.autograd.grad(velocity.square().mean(), list(factors.values()))


def by_shape(model: DiffusionModel, shapes: Sequence[SampleShape]) -> dict[SampleShape | None, DiffusionModel]:
    """Shape → the model for samples of that shape. The key is None if there is only one, as in `SampleGroup.shape`."""
    if len(shapes) == 1:
        return {None: model}
    return {shape: model.of_shape(shape) for shape in shapes}
