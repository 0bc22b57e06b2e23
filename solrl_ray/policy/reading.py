"""Reads LoRA files of this project and of other trainers: module names and strength (alpha).

| written by | keys | alpha |
|---|---|---|
| us, diffusers | ``transformer.<ours>.lora_A.weight`` | in the header, PEFT's `LoraConfig`; else the rank |
| PEFT, as Flow-GRPO saves | ``base_model.model.<ours>.lora_A.weight`` | in ``adapter_config.json`` beside it |
| ai-toolkit | as diffusers, or ``diffusion_model.<ours or published>.lora_A.weight`` | the rank |
| SimpleTuner | as ai-toolkit; in 2024 ``transformer.<ours>.lora.down.weight`` | in ``….alpha``, or in the header |
| kohya's scripts | ``lora_unet_<published>.lora_down.weight`` | in ``….alpha`` |
| OneTrainer, LyCORIS | ``lora_transformer_<ours>.lora_down.weight``, ``lycoris_<ours>….`` | in ``….alpha`` |
| DiffSynth-Studio | ``<ours or published>.lora_A.default.weight`` | the rank |
| XLabs | ``double_blocks.0.processor.qkv_lora1.down.weight`` | the rank |

``<ours>`` is a module path of diffusers, ``<published>`` one of the model as first published. The prefix
``diffusion_model.`` may also be ``model.diffusion_model.``.

In a file without alpha, alpha is the rank, as in diffusers, ComfyUI and kohya's converters.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor
from torch.nn import functional

from solrl_ray.common.files import read_regular, stand_in
from solrl_ray.common.finite import first_not_finite
from solrl_ray.common.module_paths import ends_in
from solrl_ray.config.schema import Lora
from solrl_ray.errors import UserError
from solrl_ray.policy.saving import FILE, METADATA_KEY
from solrl_ray.policy.tool_names import OURS, PEFT, Network, keys_of
from solrl_ray.records import Address
from solrl_ray.sampling.noise import standard_normal

READ = {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"}
"""Fields of PEFT's `LoraConfig` that determine the effect of the factors; they are read."""
NEUTRAL = {
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "inference_mode"),
    *("task_type", "peft_version", "base_model_name_or_path", "revision", "auto_mapping", "megatron_core"),
    *("qalora_group_size", "runtime_config"),
}
"""Fields that do not change the effect of the factors; they are ignored. All further fields change it, unless they are
empty or have a value of `USUAL`.
"""
USUAL = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, "gaussian", "orthogonal", "eva")}
KINDS = {
    "lora_te": "of a text encoder",
    "text_encoder": "of a text encoder",
    "lokr_": "of LoKr",
    "hada_": "of LoHa",
    r"dora_|magnitude_vector": "of DoRA",
    r"\.oft_": "of OFT",
    r"\.[ab][12]\.weight$": "of GLoRA",
    r"\.scalar$": "a scale of LyCORIS",
    "bundle_emb": "an embedding of OneTrainer",
    "lora_mid": "of a convolution",
    r"\.diff(_b)?$": "a whole difference of weights",
}
"""Patterns in keys → the kind of tensor, which a run cannot start from."""
TRAINERS = {
    "^lora_transformer": "OneTrainer",
    "^lycoris_": "LyCORIS",
    r"\.processor\.": "XLabs",
    r"\.default\.weight$": "DiffSynth-Studio",
    "^lora_unet_": "kohya's scripts",
}
"""Patterns in keys → the trainer that writes such keys."""
FLOATING = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
"""Data types of factors. An alpha may also be an integer."""
MOST_STRENGTH = 1000.0
"""Upper bound of alpha / rank. Larger values occur in files of other methods, which ignore them."""
PEFT_FILE, PEFT_HEADER = "adapter_model.safetensors", "adapter_config.json"
"""File names in a folder written by PEFT's ``save_pretrained``."""
PARTS = {
    **dict.fromkeys(("lora_A.weight", "lora_down.weight", "lora_A.default.weight", "lora.down.weight"), "A"),
    **dict.fromkeys(("lora_B.weight", "lora_up.weight", "lora_B.default.weight", "lora.up.weight"), "B"),
    "down.weight": "A",
    "up.weight": "B",
    "alpha": "alpha",
}
"""Endings of keys → A, B or alpha. Longer endings come before their own endings."""


def lora_file(path: Path) -> Path | None:
    """The LoRA file at `path`, which may be a file or a folder of diffusers or PEFT; None if there is none."""
    candidates = (path, path / FILE, path / PEFT_FILE)
    return next((file for file in candidates if file.is_file()), None)


def load_lora(path: Path, lora: Lora, network: Network) -> dict[str, Tensor]:
    """Read a LoRA file of a trainer in the table above; `path` as for `lora_file`.

    All linears get rank `lora.rank` (`_filled`). If several of our linears share one LoRA, it is split exactly: each
    gets its rows of B and a copy of A. If its rank is larger than `lora.rank`, columns of B that are zero in a linear's
    rows are removed, which takes a block-diagonal B apart.

    Returns float32 factors by name, in sorted order; those of 1×1 convolutions are matrices. B is scaled so that with
    `lora` each weight changes as the file states. Where alpha / rank of file and `lora` agree, B stays bit for bit.

    Raises UserError if the file is missing, damaged, not finite or of a larger rank. Also if its metadata has settings
    that a run cannot keep, or if it holds anything but LoRA factors of `network`.
    """
    file = lora_file(path) or path
    linears = keys_of(network)
    by_linear, adapter = _read(file, linears, network)
    factors = dict[str, Tensor]()
    for name, given in by_linear.items():
        a, b = _matrices(name, given, file)
        alpha = _alpha(linears[name][0], len(a), given.get("alpha"), adapter, file)
        b = b * (alpha * lora.rank / (len(a) * lora.alpha))
        rows = [network.rows[linear] for linear in linears[name]]
        if len(b) != sum(rows):
            raise UserError(
                f"The LoRA file {file} holds {len(b)} rows of {name}, but the model has {sum(rows)}: it is of another "
                "base model."
            )
        for linear, block in zip(linears[name], b.split(rows), strict=True):
            if len(rows) > 1 and not block.any() and not ends_in(linear, lora.targets):
                continue  # an untrained part of a linear that is trained in part
            if f"{linear}.lora_A" in factors:
                raise UserError(f"The LoRA file {file} holds {linear} twice, again as {name}.")
            kept = _columns(block, lora.rank)
            factors |= {f"{linear}.lora_A": a[kept], f"{linear}.lora_B": block[:, kept]}
    ranks = {name.removesuffix(".lora_A"): len(factor) for name, factor in factors.items() if name.endswith("A")}
    if (most := max(ranks.values(), default=lora.rank)) != lora.rank:
        linear = max(ranks, key=ranks.__getitem__)
        raise UserError(
            f"The LoRA file {file} holds rank {most} of {linear}; model.lora.rank is {lora.rank}. Set model.lora.rank "
            f"to {most}."
        )
    return {name: _filled(name, factor, lora.rank) for name, factor in sorted(factors.items())}


def _filled(name: str, factor: Tensor, rank: int) -> Tensor:
    """Extend a factor to `rank`, with the same product B A.

    B gets columns of zeros; A gets rows drawn as for a new adapter, so that they can be trained.
    """
    if name.endswith(".lora_B"):
        return functional.pad(factor, (0, rank - factor.shape[1]))
    address = Address(run_seed=0, purpose="rank", prompt_id=name)
    rows = torch.from_numpy(standard_normal(address, (rank, factor.shape[1]))) / rank
    return torch.cat([factor, rows[len(factor) :]])


def _read(
    file: Path, linears: Collection[str], network: Network
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any] | None]:
    """The file's tensors as float32, by name of the linear and value of `PARTS`; and its adapter settings, if any."""
    try:
        with safetensors.safe_open(file, framework="pt") as content:
            header = (content.metadata() or {}).get(METADATA_KEY)
            keys = sorted(content.keys())
            for key in keys:
                if kind := next((kind for part, kind in KINDS.items() if re.search(part, key)), ""):
                    problem = f"{key}, {kind}; a run can only start from plain LoRA of the transformer."
                    raise UserError(f"The LoRA file {file} holds {problem}")
            # Before any tensor is read: the file may be a whole model.
            parsed = {key: _parse(key, linears, network, file) for key in keys}
            for key, (_, part) in parsed.items():
                kind = content.get_slice(key).get_dtype()
                if kind not in FLOATING and (part != "alpha" or kind[0] != "I"):
                    raise UserError(
                        f"The LoRA file {file} holds {key} of {kind}; it must be of floating-point numbers."
                    )
            tensors = {key: content.get_tensor(key).float() for key in parsed}
    except (OSError, safetensors.SafetensorError) as error:
        wrong = stand_in(file.open("rb").read(200)) if file.is_file() else ""
        raise UserError(f"The LoRA file {file} {wrong or f'cannot be read as safetensors: {error}'}.") from error
    if header is None and any(key.startswith(PEFT) for key in parsed):
        beside = file.with_name(PEFT_HEADER)
        if not beside.is_file():
            raise UserError(
                f"The LoRA file {file} is of PEFT, which writes alpha to {PEFT_HEADER}; put that into the same folder."
            )
        header = read_regular(beside).decode(errors="replace")
    if key := first_not_finite(tensors):
        raise UserError(f"The LoRA file {file} holds NaN or Inf in {key}.")
    by_linear = dict[str, dict[str, Tensor]]()
    for key, (name, part) in parsed.items():
        by_linear.setdefault(name, {})[part] = tensors[key]
    return by_linear, None if header is None else _adapter(header, file)


def _parse(key: str, linears: Collection[str], network: Network, file: Path) -> tuple[str, str]:
    """Split a key into the name of its linear and the value of `PARTS`. Raises UserError if it is no LoRA factor."""
    end = next((end for end in PARTS if key.endswith(f".{end}")), "")
    name = key.removesuffix(f".{end}")
    if name not in linears:
        trainer = next((f" of {trainer}" for part, trainer in TRAINERS.items() if re.search(part, key)), "")
        problem = f"which is not a LoRA factor of a linear layer of {network.name}"
        raise UserError(f"The LoRA file {file}{trainer} holds {key}, {problem}.")
    return name, PARTS[end]


def _matrices(name: str, given: Mapping[str, Tensor], file: Path) -> tuple[Tensor, Tensor]:
    """A [rank, in] and B [out, rank] of one linear. Raises UserError if they are not a pair of matrices."""
    a, b = (given.get(part, torch.empty(0)) for part in "AB")
    a, b = (factor[:, :, 0, 0] if factor.shape[2:] == (1, 1) else factor for factor in (a, b))
    if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1]:
        raise UserError(
            f"The LoRA file {file} holds no pair of matrices for {name}: A is {list(a.shape)}, B {list(b.shape)}."
        )
    return a, b


def _alpha(linear: str, rank: int, given: Tensor | None, adapter: Mapping[str, Any] | None, file: Path) -> float:
    """The file's alpha for a linear: it adds alpha / rank · B A. Raises UserError if rank or alpha is invalid."""
    if given is None and adapter is None:
        return rank
    if given is not None:
        alpha = float(given) if given.numel() == 1 else 0.0
    elif adapter is not None:
        if (stated := _of(linear, adapter, "r", "rank_pattern")) != rank:
            raise UserError(f"The LoRA file {file} states rank {stated} of {linear} but holds rank {rank}.")
        alpha = _of(linear, adapter, "lora_alpha", "alpha_pattern")
        alpha *= math.sqrt(rank) if adapter.get("use_rslora") else 1.0
    if not 0.0 < alpha <= MOST_STRENGTH * rank:
        shown = alpha if given is None else given.tolist()
        allowed = f"above 0, and at most {MOST_STRENGTH:g} times the rank, {rank}"
        raise UserError(f"The LoRA file {file} has alpha {shown} of {linear}; it must be {allowed}.")
    return alpha


def _columns(block: Tensor, rank: int) -> list[int]:
    """The columns of B that a linear keeps: all; if they are more than `rank`, those that are not zero.

    Zero columns are added in order until there are `rank`.
    """
    columns = range(block.shape[1])
    if len(columns) <= rank:
        return list(columns)
    used = block.any(dim=0).tolist()
    unused = [column for column in columns if not used[column]]
    return sorted([*(column for column in columns if used[column]), *unused][: max(rank, sum(used))])


def _of(module: str, adapter: Mapping[str, Any], name: str, pattern: str) -> float:
    """Rank or alpha of a module: the value of the first pattern that matches the end of its path, as in PEFT."""
    patterns: Mapping[str, float] = adapter.get(pattern) or {}
    return next((patterns[end] for end in patterns if re.match(rf"(.*\.)?({end})$", module)), adapter[name])


def _adapter(header: str, file: Path) -> dict[str, Any]:
    """Parse a LoRA file's metadata.

    Raises UserError if it does not describe an adapter of a transformer, or has settings that a run cannot keep.
    """
    try:
        adapter = {name.removeprefix(OURS): value for name, value in json.loads(header).items()}
        patterns = [adapter.get(name) or {} for name in ("rank_pattern", "alpha_pattern")]
        numbers = [adapter["r"], adapter["lora_alpha"], *patterns[0].values(), *patterns[1].values()]
        stated = all(0 < number < math.inf and float(number) for number in numbers)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        stated = False
    if not stated:
        raise UserError(
            f"The header of the LoRA file {file} ({METADATA_KEY}, {PEFT_HEADER}) does not state r and lora_alpha of a "
            f"transformer's adapter: {header[:60]}"
        )
    changes = {name: value for name, value in adapter.items() if name not in READ | NEUTRAL and value}
    changes = {name: value for name, value in changes.items() if value not in USUAL.get(name, ())}
    # Only plain paths: matching some regular expressions takes forever.
    changes |= {end: "a pattern" for pattern in patterns for end in pattern if not re.fullmatch(r"\^?[\w.]+", end)}
    if changes:
        name, value = next(iter(changes.items()))
        raise UserError(
            f"The LoRA file {file} has {name} {value!r:.80} in its header, which a run cannot continue with."
        )
    return adapter
