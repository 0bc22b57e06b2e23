"""Which of several shapes the samples of a prompt have."""

from __future__ import annotations

from collections.abc import Sequence

from solrl_ray.records import Address, Prompt, SampleShape
from solrl_ray.sampling.noise import uniform


def shape_of(prompt: Prompt, shapes: Sequence[SampleShape], run_seed: int) -> SampleShape:
    """The shape that the prompt's file names, else one of `shapes`, each with the same probability.

    The draw depends on run seed and prompt alone: previews, samples and evaluations of a prompt have one shape, in
    every iteration.

    Raises ValueError if the file names a shape that is none of `shapes`.
    """
    if prompt.shape is not None and prompt.shape not in shapes:
        raise ValueError(f"prompt {prompt.id} names the shape {prompt.shape}, which is none of model.resolution")
    if prompt.shape is not None or len(shapes) == 1:
        return prompt.shape or shapes[0]
    address = Address(run_seed=run_seed, purpose="sample-shape", prompt_id=prompt.id)
    return shapes[int(uniform(address, (1,))[0] * len(shapes))]
