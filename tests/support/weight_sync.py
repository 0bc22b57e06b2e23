"""A small attention block, its LoRA factors and what is published of them, for the tests of revisions."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from solrl_ray.config.schema import Config, Lora, QuantizationScope
from solrl_ray.quantization.scope import quantize_
from solrl_ray.weight_sync.payload import Payload, Revision
from solrl_ray.weight_sync.publication import EXPLORER, Publication
from solrl_ray.weight_sync.publish import Publisher
from tests.support.made_configs import changed
from tests.support.small import small_config
from tests.support.tensors import randn

LORA = Lora(rank=4, alpha=8.0, targets=["to_q", "to_out.0"])
SCOPE = QuantizationScope(skip=["to_out"])
QUERY, OUT = "attn.to_q", "attn.to_out.0"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(48, 32)
        self.to_k = nn.Linear(48, 32)
        self.to_out = nn.Sequential(nn.Linear(32, 48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.to_out(self.to_q(x) * torch.tanh(self.to_k(x)))
        return out


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    net = nn.ModuleDict({"attn": Attention()}).requires_grad_(False).eval()
    for index, parameter in enumerate(net.parameters()):
        parameter.copy_(randn(*parameter.shape, seed=index) / 6)
    return net.to(dtype)


def factors(scale: float = 0.1, seed: int = 50) -> dict[str, torch.Tensor]:
    return {
        f"{OUT}.lora_A": randn(4, 32, seed=seed) * scale,
        f"{OUT}.lora_B": randn(48, 4, seed=seed + 1) * scale,
        f"{QUERY}.lora_A": randn(4, 48, seed=seed + 2) * scale,
        f"{QUERY}.lora_B": randn(32, 4, seed=seed + 3) * scale,
    }


def config(tier: str = "nvfp4-emulated", mode: str = "packed", *, lora: Lora = LORA) -> Config:
    return changed(
        small_config(Path("unused"), "unused"),
        model={"lora": lora.model_dump(), "quantization": SCOPE.model_dump()},
        rollout={"explore": {"precision": tier}},
        publish={"mode": mode},
    )


def publisher(net: nn.Module | None = None, tier: str = "nvfp4-emulated", mode: str = "packed") -> Publisher:
    return Publisher.for_model(model() if net is None else net, config(tier, mode), tier=tier)


def explorer(tier: str = "nvfp4-emulated") -> nn.Module:
    net = model()
    quantize_(net, tier, SCOPE, without_kernels=True)
    return net


def addresses(net: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in net.state_dict().items()}


def publication(revision: Revision, mode: str = "packed") -> Publication:
    return Publication(revision=revision, mode=mode)


def sent(revision: Revision, role: str = EXPLORER, mode: str = "packed") -> Payload:
    """What arrives at a worker, through the bytes that it travels as."""
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(publication(revision, mode).payload(role), protocol=5, buffer_callback=buffers.append)
    arrived: Payload = pickle.loads(message, buffers=[bytes(buffer.raw()) for buffer in buffers])
    arrived.verify()
    return arrived


def flipped(payload: Payload, name: str) -> Payload:
    """The payload with one bit of a tensor turned."""
    altered = payload.tensors[name].clone()
    altered.reshape(-1).view(torch.uint8)[3] ^= 0x10
    return replace(payload, tensors=payload.tensors | {name: altered})


def same(one: Revision, other: Revision) -> bool:
    equal = [torch.equal(one.tensors[name], tensor) for name, tensor in other.tensors.items()]
    return one.manifest == other.manifest and one.tensors.keys() == other.tensors.keys() and all(equal)
