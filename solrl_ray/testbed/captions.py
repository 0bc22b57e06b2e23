"""Batches of scenes as integer tensors: drawing them, changing them, and their token ids, without any text.

A batch is int64 [B, 9], rows as `world.Scene.fields`. Pre-training draws millions of captions; tensors on the device
avoid the tokenizers (a test compares the ids with theirs).
"""

from __future__ import annotations

import torch

from solrl_ray.testbed.wordpieces import CLIP_TOKENS, T5_TOKENS, clip_tokenizer, t5_tokenizer, words
from solrl_ray.testbed.world import FIELD_VALUES, RELATIONS

_COUNTS = torch.tensor([len(values) for values in FIELD_VALUES])
_FIRST, _RELATION, _SECOND = slice(1, 4), 4, slice(5, 8)
_MIRRORED = torch.tensor([1, 0, 3, 2])
"""Index of the relation that means the same with the objects named in the other order."""


def draw(count: int, generator: torch.Generator, single: float = 1 / 16) -> torch.Tensor:
    """`count` random scenes, a share `single` of them with one object, on the generator's device."""
    fields = _uniform_fields(count, generator)
    objects = 2 - (torch.rand(count, device=generator.device, generator=generator) < single).long()
    return _blank(torch.cat([objects[:, None], fields], dim=1))


def corrupt(fields: torch.Tensor, share: float, generator: torch.Generator) -> torch.Tensor:
    """Replaces each word of each scene, with probability `share`, by a random word of its kind."""
    replace = torch.rand(len(fields), 8, device=fields.device, generator=generator) < share
    drawn = _uniform_fields(len(fields), generator)
    return _blank(torch.cat([fields[:, :1], torch.where(replace, drawn, fields[:, 1:])], dim=1))


def neighbours(fields: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One near miss per scene: a single word changed, or the objects' sizes, colours, shapes exchanged."""
    size = len(fields)
    counts = _COUNTS.to(fields.device)
    offsets = 1 + (torch.rand(size, 8, device=fields.device, generator=generator) * (counts - 1)).long()
    column = torch.randint(8, (size,), device=fields.device, generator=generator)
    column = torch.where((fields[:, 0] == 1) & (column > 2), 7, column)
    chosen = torch.nn.functional.one_hot(column, 8)
    changed = torch.cat([fields[:, :1], (fields[:, 1:] + chosen * offsets) % counts], dim=1)
    exchange = torch.randint(3, (size,), device=fields.device, generator=generator)
    exchanged = fields.clone()
    rows = torch.arange(size, device=fields.device)
    exchanged[rows, 1 + exchange] = fields[rows, 5 + exchange]
    exchanged[rows, 5 + exchange] = fields[rows, 1 + exchange]
    use_exchange = (torch.rand(size, device=fields.device, generator=generator) < 0.3) & (fields[:, 0] == 2)
    return _blank(torch.where(use_exchange[:, None], exchanged, changed))


def meaning(fields: torch.Tensor) -> torch.Tensor:
    """One integer per scene, equal for captions of the same pictures (``A left of B``, ``B right of A``); int64 [B]."""
    mirrored = fields.clone()
    mirrored[:, _FIRST], mirrored[:, _SECOND] = fields[:, _SECOND], fields[:, _FIRST]
    mirrored[:, _RELATION] = _MIRRORED.to(fields.device)[fields[:, _RELATION]]
    code, mirrored_code = _code(fields), _code(mirrored)
    return torch.where(fields[:, 0] == 2, torch.minimum(code, mirrored_code), code)


class TokenTable:
    """Token ids of captions, exactly as the testbed's two tokenizers write them."""

    def __init__(self, device: torch.device) -> None:
        number = {word: index for index, word in enumerate(words())}
        width = max(len(phrase.split()) for phrase in RELATIONS)
        self._fields = []
        for values in FIELD_VALUES:
            rows = [[number[word] for word in phrase.split()] for phrase in values]
            columns = width if values == tuple(RELATIONS) else 1
            self._fields.append(torch.tensor([row + [-1] * (columns - len(row)) for row in rows], device=device))
        self._a, self._on = number["a"], number["on"]
        self._clip, self._t5 = clip_tokenizer(), t5_tokenizer()
        self._clip_ids = torch.tensor([self._clip(word).input_ids[1] for word in number], device=device)
        self._t5_ids = torch.tensor([self._t5(word).input_ids[0] for word in number], device=device)

    def t5(self, fields: torch.Tensor) -> torch.Tensor:
        """Ids of the T5 tokenizer, padded to `T5_TOKENS`: int64 [B, T5_TOKENS]."""
        sentence = self._sentence(fields)
        ids = torch.full((len(fields), T5_TOKENS), self._t5.pad_token_id, device=fields.device)
        ids[:, : sentence.shape[1]] = torch.where(sentence >= 0, self._t5_ids[sentence], self._t5.pad_token_id)
        ids[torch.arange(len(fields)), (sentence >= 0).sum(dim=1)] = self._t5.eos_token_id
        return ids

    def clip(self, fields: torch.Tensor) -> torch.Tensor:
        """Ids of the CLIP tokenizer, padded to `CLIP_TOKENS`: int64 [B, CLIP_TOKENS]."""
        sentence, end = self._sentence(fields), self._clip.eos_token_id
        ids = torch.full((len(fields), CLIP_TOKENS), end, device=fields.device)
        ids[:, 0] = self._clip.bos_token_id
        ids[:, 1 : 1 + sentence.shape[1]] = torch.where(sentence >= 0, self._clip_ids[sentence], end)
        return ids

    def _sentence(self, fields: torch.Tensor) -> torch.Tensor:
        """Word numbers of the captions, left-aligned, -1 after the last word."""
        a, on = (torch.full((len(fields), 1), word, device=fields.device) for word in (self._a, self._on))
        columns = [table[fields[:, 1 + i]] for i, table in enumerate(self._fields)]
        second = torch.cat([columns[3], a, *columns[4:7]], dim=1)
        second = torch.where((fields[:, 0] == 2)[:, None], second, -1)
        sentence = torch.cat([a, *columns[:3], second, on, columns[7]], dim=1)
        order = torch.argsort((sentence < 0).long(), dim=1, stable=True)
        return sentence.gather(1, order)


def _uniform_fields(count: int, generator: torch.Generator) -> torch.Tensor:
    counts = _COUNTS.to(generator.device)
    return (torch.rand(count, 8, device=generator.device, generator=generator) * counts).long()


def _blank(fields: torch.Tensor) -> torch.Tensor:
    """Zeroes relation and second object of scenes with one object."""
    fields = fields.clone()
    fields[:, _RELATION : _SECOND.stop] *= (fields[:, :1] == 2).long()
    return fields


def _code(fields: torch.Tensor) -> torch.Tensor:
    code = fields[:, 0]
    for column, count in enumerate(_COUNTS.tolist(), start=1):
        code = code * count + fields[:, column]
    return code
