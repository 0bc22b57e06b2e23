"""Reads LoRA files, ours and those of other trainers: their names and their strength (alpha).

| written by | keys | alpha |
|---|---|---|
| us, diffusers | ``transformer.<ours>.lora_A.weight`` | in the header, PEFT's `LoraConfig`; else the rank |
| PEFT, as Flow-GRPO saves | ``base_model.model.<ours>.lora_A.weight`` | in ``adapter_config.json`` beside it |
| ai-toolkit | the same, or ``diffusion_model.<ours or published>.lora_A.weight`` | the rank |
| SimpleTuner | either; in 2024 ``transformer.<ours>.lora.down.weight`` | in ``….alpha``, or in the header |
| kohya's scripts | ``lora_unet_<published>.lora_down.weight`` | in ``….alpha`` |
| OneTrainer, LyCORIS | ``lora_transformer_<ours>.lora_down.weight``, ``lycoris_<ours>….`` | in ``….alpha`` |
| DiffSynth-Studio | ``<ours or published>.lora_A.default.weight`` | the rank |
| XLabs | ``double_blocks.0.processor.qkv_lora1.down.weight`` | the rank |

Before ``diffusion_model.`` may stand ``model.``.

A file without alpha is applied as if alpha were the rank: so diffusers, ComfyUI and kohya's converters have it.
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
"""Fields of PEFT's `LoraConfig` that say what the factors mean."""
NEUTRAL = {
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "inference_mode"),
    *("task_type", "peft_version", "base_model_name_or_path", "revision", "auto_mapping", "megatron_core"),
    *("qalora_group_size", "runtime_config"),
}
"""Those that change nothing of it. Others change it unless they are empty or have one of these values."""
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
"""Patterns in keys → what is there that a run cannot begin with."""
TRAINERS = {
    "^lora_transformer": "OneTrainer",
    "^lycoris_": "LyCORIS",
    r"\.processor\.": "XLabs",
    r"\.default\.weight$": "DiffSynth-Studio",
    "^lora_unet_": "kohya's scripts",
}
"""Patterns in keys → who writes them."""
FLOATING = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
"""Data types of factors. An alpha may be a whole number."""
MOST_STRENGTH = 1000.0
"""Of alpha / rank. Larger ones stand in files of other methods, where they mean nothing."""
PEFT_FILE, PEFT_HEADER = "adapter_model.safetensors", "adapter_config.json"
"""Names in a folder of PEFT's ``save_pretrained``."""
PARTS = {
    **dict.fromkeys(("lora_A.weight", "lora_down.weight", "lora_A.default.weight", "lora.down.weight"), "A"),
    **dict.fromkeys(("lora_B.weight", "lora_up.weight", "lora_B.default.weight", "lora.up.weight"), "B"),
    "down.weight": "A",
    "up.weight": "B",
    "alpha": "alpha",
}
"""Ends of keys, longer ones before those that they end in."""


def lora_file(path: Path) -> Path | None:
    """The LoRA file that `path` is, or that it has as a folder of diffusers or PEFT."""
    places = (path, path / FILE, path / PEFT_FILE)
    return next((place for place in places if place.is_file()), None)


def load_lora(path: Path, lora: Lora, network: Network) -> dict[str, Tensor]:
    """Read a LoRA file of the kinds above; `path` as for `lora_file`. All linears get `lora.rank`, see `_filled`.

    Rows of several of our linears that share one LoRA are split exactly, each with its own copy of A. Columns of B that
    are zero in a linear's rows are left out if the rank is larger than `lora.rank`: a block-diagonal B comes apart.

    Returns the float32 factors by name in sorted order, those of 1×1 convolutions as matrices, and B multiplied so that
    with `lora` they change each weight as the file says. They stay bit for bit where its alpha / rank is the file's.

    Raises UserError: the file is missing, damaged, not finite, of another rank, with metadata that changes its meaning
    in a way that a run cannot keep, or holds more than LoRA factors of `network`.
    """
    file = lora_file(path) or path
    linears = keys_of(network)
    found, adapter = _read(file, linears, network)
    factors = dict[str, Tensor]()
    for name, given in found.items():
        a, b = _matrices(name, given, file)
        alpha = _alpha(linears[name][0], len(a), given.get("alpha"), adapter, file)
        b = b * (alpha * lora.rank / (len(a) * lora.alpha))
        rows = [network.rows[linear] for linear in linears[name]]
        if len(b) != sum(rows):
            raise UserError(f"The LoRA file {file} holds {len(b)} rows of {name}, as of another base.")
        for linear, block in zip(linears[name], b.split(rows), strict=True):
            if len(rows) > 1 and not block.any() and not ends_in(linear, lora.targets):
                continue  # the rest of a linear of which only some parts are trained
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
    """A factor of a file whose largest rank is `rank`, as one of that rank with the same product: B gets columns of
    zeros, and A rows as of a new adapter, so that they can be trained.
    """
    if name.endswith(".lora_B"):
        return functional.pad(factor, (0, rank - factor.shape[1]))
    address = Address(run_seed=0, purpose="rank", prompt_id=name)
    rows = torch.from_numpy(standard_normal(address, (rank, factor.shape[1]))) / rank
    return torch.cat([factor, rows[len(factor) :]])


def _read(
    file: Path, linears: Collection[str], network: Network
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any] | None]:
    """A file's tensors as float32, by the name of their linear and of `PARTS`; and its adapter's settings, if any."""
    try:
        with safetensors.safe_open(file, framework="pt") as content:
            header = (content.metadata() or {}).get(METADATA_KEY)
            keys = sorted(content.keys())
            for key in keys:
                if kind := next((kind for part, kind in KINDS.items() if re.search(part, key)), ""):
                    problem = f"{key}, {kind}; a run begins with plain LoRA of the transformer alone."
                    raise UserError(f"The LoRA file {file} holds {problem}")
            # Before any tensor is read: the file may be a whole model.
            places = {key: _place(key, linears, network, file) for key in keys}
            for key, (_, part) in places.items():
                kind = content.get_slice(key).get_dtype()
                if kind not in FLOATING and (part != "alpha" or kind[0] != "I"):
                    raise UserError(
                        f"The LoRA file {file} holds {key} of {kind}; it must be of floating-point numbers."
                    )
            tensors = {key: content.get_tensor(key).float() for key in places}
    except (OSError, safetensors.SafetensorError) as error:
        wrong = stand_in(file.open("rb").read(200)) if file.is_file() else ""
        raise UserError(f"The LoRA file {file} {wrong or f'cannot be read as safetensors: {error}'}.") from error
    if header is None and any(key.startswith(PEFT) for key in places):
        beside = file.with_name(PEFT_HEADER)
        if not beside.is_file():
            raise UserError(
                f"The LoRA file {file} is of PEFT, which writes alpha to {PEFT_HEADER}; put it beside the file."
            )
        header = read_regular(beside).decode(errors="replace")
    if key := first_not_finite(tensors):
        raise UserError(f"The LoRA file {file} holds NaN or Inf in {key}.")
    found = dict[str, dict[str, Tensor]]()
    for key, (name, part) in places.items():
        found.setdefault(name, {})[part] = tensors[key]
    return found, None if header is None else _adapter(header, file)


def _place(key: str, linears: Collection[str], network: Network, file: Path) -> tuple[str, str]:
    """The name of a key's linear, and the value of `PARTS`."""
    end = next((end for end in PARTS if key.endswith(f".{end}")), "")
    name = key.removesuffix(f".{end}")
    if name not in linears:
        trainer = next((f" of {trainer}" for part, trainer in TRAINERS.items() if re.search(part, key)), "")
        problem = f"which is not a LoRA factor of a linear layer of {network.name}"
        raise UserError(f"The LoRA file {file}{trainer} holds {key}, {problem}.")
    return name, PARTS[end]


def _matrices(name: str, given: Mapping[str, Tensor], file: Path) -> tuple[Tensor, Tensor]:
    """A [rank, in] and B [out, rank] of one linear."""
    a, b = (given.get(part, torch.empty(0)) for part in "AB")
    a, b = (factor[:, :, 0, 0] if factor.shape[2:] == (1, 1) else factor for factor in (a, b))
    if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1]:
        raise UserError(
            f"The LoRA file {file} holds no pair of matrices for {name}: A is {list(a.shape)}, B {list(b.shape)}."
        )
    return a, b


def _alpha(linear: str, rank: int, given: Tensor | None, adapter: Mapping[str, Any] | None, file: Path) -> float:
    """What the file applies, divided by `rank`, to B A."""
    if given is None and adapter is None:
        return rank
    if given is not None:
        alpha = float(given) if given.numel() == 1 else 0.0
    elif adapter is not None:
        if (said := _of(linear, adapter, "r", "rank_pattern")) != rank:
            raise UserError(f"The LoRA file {file} says rank {said} of {linear} and holds rank {rank}.")
        alpha = _of(linear, adapter, "lora_alpha", "alpha_pattern")
        alpha *= math.sqrt(rank) if adapter.get("use_rslora") else 1.0
    if not 0.0 < alpha <= MOST_STRENGTH * rank:
        shown = alpha if given is None else given.tolist()
        right = f"above 0, and at most {MOST_STRENGTH:g} times the rank, {rank}"
        raise UserError(f"The LoRA file {file} has alpha {shown} of {linear}; it must be {right}.")
    return alpha


def _columns(block: Tensor, rank: int) -> list[int]:
    """Which columns of B a linear keeps: all, or of more than `rank` those that are not zero, filled up in order."""
    columns = range(block.shape[1])
    if len(columns) <= rank:
        return list(columns)
    used = block.any(dim=0).tolist()
    unused = [column for column in columns if not used[column]]
    return sorted([*(column for column in columns if used[column]), *unused][: max(rank, sum(used))])


def _of(module: str, adapter: Mapping[str, Any], name: str, pattern: str) -> float:
    """A module's rank or alpha: that of the first pattern that matches the end of its path, as PEFT has it."""
    patterns: Mapping[str, float] = adapter.get(pattern) or {}
    return next((patterns[end] for end in patterns if re.match(rf"(.*\.)?({end})$", module)), adapter[name])


def _adapter(header: str, file: Path) -> dict[str, Any]:
    """A LoRA file's metadata. Raises UserError if it is no transformer's adapter, or means what a run cannot keep."""
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
    # Paths, no other expressions: some take for ever.
    changes |= {end: "a pattern" for each in patterns for end in each if not re.fullmatch(r"\^?[\w.]+", end)}
    if changes:
        name, value = next(iter(changes.items()))
        raise UserError(
            f"The LoRA file {file} has {name} {value!r:.80} in its header, which a run cannot continue with."
        )
    return adapter
