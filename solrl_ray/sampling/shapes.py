"""Which of several shapes the samples of a prompt have: an addressed draw."""

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
    if (named := prompt.shape) is not None:
        if found := next((shape for shape in shapes if named.is_size_of(shape)), None):
            return found
        raise ValueError(f"prompt {prompt.id} names the shape {named}, which is none of model.resolution")
    if len(shapes) == 1:
        return shapes[0]
    address = Address(run_seed=run_seed, purpose="sample-shape", prompt_id=prompt.id)
    return shapes[int(uniform(address, (1,))[0] * len(shapes))]
