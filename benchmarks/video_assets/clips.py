"""The moving world: clips of two testbed objects that rotate about each other, from one relation to another.

    a small red circle left of a large blue ring then above on black

The first frame shows the testbed's scene with the first relation, the last frame the scene with the second. So the
testbed's reward can score how well a clip shows its caption.
"""

from __future__ import annotations

import math

import torch
from testbed_assets import captions
from torch import Tensor

from solrl_ray.testbed.world import FIELD_VALUES, JITTERS, RELATIONS, RESOLUTION, Scene, render

FRAMES = 9
"""Three latent frames of an autoencoder with Wan's stride of 4."""
RELATION = 4
"""Column of `Scene.fields`."""
MEANINGS = 3 * math.prod(map(len, FIELD_VALUES))
"""An upper bound of the values of `captions.meaning`."""
DISTANCE = 0.48
"""Distance of each object from the middle, as in the testbed's images."""


def draw(count: int, generator: torch.Generator) -> Tensor:
    """Random clips: int64 [count, 10], a scene with two objects, and the relation in the last frame."""
    scenes = captions.draw(count, generator, single=0.0)
    device = generator.device
    further = torch.randint(1, len(RELATIONS), (count,), device=device, generator=generator)
    return torch.cat([scenes, ((scenes[:, RELATION] + further) % len(RELATIONS))[:, None]], dim=1)


def corrupt(clips: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Replace each word, with probability `share`, by a random one of its kind."""
    device = clips.device
    other = torch.randint(len(RELATIONS), (len(clips),), device=device, generator=generator)
    replaced = torch.rand(len(clips), device=device, generator=generator) < share
    last = torch.where(replaced, other, clips[:, -1])
    return torch.cat([captions.corrupt(clips[:, :-1], share, generator), last[:, None]], dim=1)


def meaning(clips: Tensor) -> Tensor:
    """One integer per clip, equal for captions of the same clips; int64 [B]."""
    first, last = (captions.meaning(scenes) for scenes in (clips[:, :-1], last_scenes(clips)))
    return first * MEANINGS + last


def last_scenes(clips: Tensor) -> Tensor:
    """The scenes of the clips' last frames, int64 [B, 9]."""
    scenes = clips[:, :-1].clone()
    scenes[:, RELATION] = clips[:, -1]
    return scenes


def caption(clip: Tensor) -> str:
    """The caption of one clip, int64 [10]."""
    first = Scene(tuple(clip[:-1].tolist())).caption
    scene, _, background = first.rpartition(" on ")
    return f"{scene} then {list(RELATIONS)[int(clip[-1])]} on {background}"


def render_clips(clips: Tensor, generator: torch.Generator, frames: int = FRAMES) -> Tensor:
    """Render one clip per row, with random jitter: float32 [B, 3, frames, 32, 32] in [0, 1]."""
    jitter = torch.rand(len(clips), JITTERS, device=clips.device, generator=generator)
    scenes = clips[:, :-1]
    pictures = [render(scenes, jitter, RESOLUTION, _centres(clips, jitter, n / (frames - 1))) for n in range(frames)]
    return torch.stack(pictures, dim=2)


def _centres(clips: Tensor, jitter: Tensor, progress: float) -> Tensor:
    """Centres [B, 2, (x, y)] after the share `progress` of the rotation, the shorter way around; 180° is clockwise."""
    angles = torch.tensor([math.atan2(y, x) for x, y in RELATIONS.values()], device=clips.device)
    first, last = angles[clips[:, RELATION]], angles[clips[:, -1]]
    turn = (last - first + math.pi - 1e-4) % (2 * math.pi) - math.pi + 1e-4
    angle = first + progress * turn
    towards = torch.stack([angle.cos(), angle.sin()], dim=1)
    across = torch.stack([-angle.sin(), angle.cos()], dim=1) * 0.4 * (jitter[:, 3, None] - 0.5)
    near = 0.12 * (torch.stack([jitter[:, 0:2], jitter[:, 4:6]], dim=1) - 0.5)
    return torch.stack([DISTANCE * towards, -DISTANCE * towards], dim=1) + across[:, None] + near
