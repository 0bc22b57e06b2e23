"""Batches of scenes as integer tensors: random scenes, random changes, and their meaning.

A batch is int64 [B, 9]; each row is a `solrl_ray.testbed.world.Scene.fields`.
"""

from __future__ import annotations

import torch

from solrl_ray.testbed.world import FIELD_VALUES

_COUNTS = torch.tensor([len(values) for values in FIELD_VALUES])
_FIRST, _RELATION, _SECOND = slice(1, 4), 4, slice(5, 8)
_MIRRORED = torch.tensor([1, 0, 3, 2])
"""Index of the relation that has the same meaning with the objects named in the other order."""


def draw(count: int, generator: torch.Generator, single: float = 1 / 16) -> torch.Tensor:
    """`count` random scenes, a share `single` of them with one object, on the generator's device."""
    fields = _uniform_fields(count, generator)
    objects = 2 - (torch.rand(count, device=generator.device, generator=generator) < single).long()
    return _blank(torch.cat([objects[:, None], fields], dim=1))


def corrupt(fields: torch.Tensor, share: float, generator: torch.Generator) -> torch.Tensor:
    """Replace each word of each scene, with probability `share`, by a random word of its kind."""
    replace = torch.rand(len(fields), 8, device=fields.device, generator=generator) < share
    drawn = _uniform_fields(len(fields), generator)
    return _blank(torch.cat([fields[:, :1], torch.where(replace, drawn, fields[:, 1:])], dim=1))


def meaning(fields: torch.Tensor) -> torch.Tensor:
    """One integer per scene, equal for captions of the same images (``A left of B``, ``B right of A``); int64 [B]."""
    mirrored = fields.clone()
    mirrored[:, _FIRST], mirrored[:, _SECOND] = fields[:, _SECOND], fields[:, _FIRST]
    mirrored[:, _RELATION] = _MIRRORED.to(fields.device)[fields[:, _RELATION]]
    code, mirrored_code = _code(fields), _code(mirrored)
    return torch.where(fields[:, 0] == 2, torch.minimum(code, mirrored_code), code)


def _uniform_fields(count: int, generator: torch.Generator) -> torch.Tensor:
    counts = _COUNTS.to(generator.device)
    return (torch.rand(count, 8, device=generator.device, generator=generator) * counts).long()


def _blank(fields: torch.Tensor) -> torch.Tensor:
    """Set relation and second object to 0 for scenes with one object."""
    fields = fields.clone()
    fields[:, _RELATION : _SECOND.stop] *= (fields[:, :1] == 2).long()
    return fields


def _code(fields: torch.Tensor) -> torch.Tensor:
    code = fields[:, 0]
    for column, count in enumerate(_COUNTS.tolist(), start=1):
        code = code * count + fields[:, column]
    return code
