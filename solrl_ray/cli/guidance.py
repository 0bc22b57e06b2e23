"""Checks that the model supports the configured guidance, for training samples and evaluations."""

from __future__ import annotations

import re
from collections.abc import Iterator

from solrl_ray.config.loading import Sources
from solrl_ray.config.problems import show
from solrl_ray.config.schema import Config, Model
from solrl_ray.errors import UserError
from solrl_ray.models import DISTILLED, FAMILIES


def check(config: Config, sources: Sources) -> None:
    """Reject guidance that the family, or a checkpoint known by its id, does not support. Raises `UserError`."""
    family = FAMILIES.get(config.model.family)
    if family is None:  # rejected elsewhere
        return
    for section, model in _models(config):
        key, cfg = f"{section}.cfg", model.cfg
        if model.guidance != 1 and not family.EMBEDS_GUIDANCE:
            raise UserError(_not_embedded(model, section, sources, f"model.family {model.family!r}"))
        if not cfg.is_on:
            continue
        cached = re.search(r"models--([^/]+)--([^/]+)/snapshots/", model.path)  # a snapshot in the hub's cache
        if ("/".join(cached.groups()) if cached else model.path) in DISTILLED:
            raise UserError(_must_be_off(model, key, sources, _built_in(model)))
        if cfg.negative_prompt and "negative_prompt" not in family.cfg_arguments(cfg):
            raise UserError(
                f"{_negative(model, key, sources)}; it must be empty, because the stock pipeline of model.family "
                f"{model.family!r} takes no negative prompt."
            )


def check_checkpoint(config: Config, sources: Sources) -> None:
    """Reject embedded guidance without a guidance embedding in the checkpoint, classifier-free guidance of a distilled
    checkpoint, and a negative prompt that would be truncated. Loads the tokenizers. Raises `UserError`.
    """
    from solrl_ray import models

    for section, model in _models(config):
        key, family = f"{section}.cfg", models.family(model)
        if model.guidance != 1 and not family.settings(model)[0].get("guidance_embeds"):
            raise UserError(_not_embedded(model, section, sources, model.path))
        if not model.cfg.is_on:
            continue
        if family.is_distilled(model):
            raise UserError(_must_be_off(model, key, sources, _built_in(model)))
        for cut in family.truncated(model, [model.cfg.negative_prompt]):
            if cut.texts:
                raise UserError(
                    f"{_negative(model, key, sources)}; it must be shorter, because {cut.tokenizer} of {model.path} "
                    f"keeps {cut.limit} tokens."
                )


def _models(config: Config) -> Iterator[tuple[str, Model]]:
    """The sections that set guidance, each with the model under that guidance."""
    yield "model", config.model
    if config.evaluated_model != config.model:
        yield "evaluation", config.evaluated_model


def _not_embedded(model: Model, section: str, sources: Sources, what: str) -> str:
    key = f"{section}.guidance"
    return (
        f"{key} is {model.guidance:g} ({sources.of(key)}); it must be 1, because {what} has no guidance embedding; "
        f"classifier-free guidance is {section}.cfg.scale."
    )


def _must_be_off(model: Model, key: str, sources: Sources, why: str) -> str:
    return f"{key}.scale is {model.cfg.scale:g} ({sources.of(f'{key}.scale')}); it must be 1, because {why}."


def _built_in(model: Model) -> str:
    return f"{model.path} is distilled, with guidance built in"


def _negative(model: Model, key: str, sources: Sources) -> str:
    prompt = show(model.cfg.negative_prompt)
    return f"{key}.negative_prompt is {prompt} ({sources.of(f'{key}.negative_prompt')})"
