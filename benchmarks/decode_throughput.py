"""How many images a second become reward inputs, beside the way of the published scripts?

From clean latents to the pixel values that a CLIP-sized reward takes (224 × 224, bicubic, as after 8-bit pictures).

- ours: `DiffusionModel.decode` in bfloat16, several images at once, and the preprocessing on the device; eager, and
  with `compile.decoder`.
- published: one image at a time, to Pillow, resized there and back, by the same autoencoder in float32 (as the
  scripts of SD3.5 keep it) and, so that the type explains nothing, in bfloat16.

    python benchmarks/decode_throughput.py [--device cuda] [--cases dc_ae_1024 …] [--eager] [--tiny] [--out FOLDER]

Autoencoders have the published sizes and random weights, which cost the same time; all ways share them. Medians after
warm-ups, the ways in turn. `--tiny`: small autoencoders at 64 px, to try the script on a CPU, where nothing is
compiled. Prints a table; writes decode_throughput.json into FOLDER (default benchmarks/results) after every case.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers import AutoencoderDC, AutoencoderKL, AutoencoderTiny
from full_size import DC_AE, kl_autoencoder
from PIL import Image
from torch import Tensor, nn

from solrl_ray.config.schema import Compile, Decoding, Lora, Model, SigmaSchedule
from solrl_ray.models.base import DiffusionModel
from solrl_ray.models.compilation import compile_decoder
from solrl_ray.models.sana import Sana
from solrl_ray.models.sd3 import StableDiffusion3
from solrl_ray.quantization.attestation import device_name
from solrl_ray.rewards.preprocessing import CLIP_MEAN, CLIP_SIZE, CLIP_STD, Preprocessing

RESULTS = Path(__file__).parent / "results"
REPEATS = 5
TINY_RESOLUTION = 64
TAE: dict[str, Any] = {"latent_channels": 16}
"""TAEF1 and TAESD3: the constructor's defaults, for 16 channels."""
SMALL: dict[type[nn.Module], dict[str, Any]] = {
    AutoencoderKL: {"block_out_channels": (32, 32, 32, 32), "layers_per_block": 1},
    AutoencoderTiny: {"encoder_block_out_channels": (8,) * 4, "decoder_block_out_channels": (8,) * 4},
    AutoencoderDC: {
        "encoder_block_out_channels": (32,) * 6,
        "decoder_block_out_channels": (32,) * 6,
        "encoder_layers_per_block": (1,) * 6,
        "decoder_layers_per_block": (1,) * 6,
    },
}
"""What `--tiny` changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    title: str
    family: type[DiffusionModel]
    autoencoder: type[nn.Module]
    settings: dict[str, Any]
    resolution: int
    images: int
    """Of one measured batch."""
    at_once: int
    """`model.decoding.micro_batch` of the shipped configuration."""


KL = kl_autoencoder(1.5305, 0.0609)
CASES = {
    "dc_ae_1024": Case(
        title="DC-AE of SANA, 1024 px",
        family=Sana,
        autoencoder=AutoencoderDC,
        settings=DC_AE,
        resolution=1024,
        images=24,
        at_once=4,
    ),
    "kl_512": Case(
        title="AutoencoderKL of FLUX and SD3, 512 px",
        family=StableDiffusion3,
        autoencoder=AutoencoderKL,
        settings=KL,
        resolution=512,
        images=24,
        at_once=8,
    ),
    "tiny_512": Case(
        title="AutoencoderTiny (TAEF1 or TAESD3), 512 px",
        family=StableDiffusion3,
        autoencoder=AutoencoderTiny,
        settings=TAE,
        resolution=512,
        images=24,
        at_once=8,
    ),
    "kl_1024": Case(
        title="AutoencoderKL of FLUX and SD3, 1024 px",
        family=StableDiffusion3,
        autoencoder=AutoencoderKL,
        settings=KL,
        resolution=1024,
        images=12,
        at_once=4,
    ),
    "tiny_1024": Case(
        title="AutoencoderTiny (TAEF1 or TAESD3), 1024 px",
        family=StableDiffusion3,
        autoencoder=AutoencoderTiny,
        settings=TAE,
        resolution=1024,
        images=12,
        at_once=4,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    case: str
    images: int
    at_once: int
    ours: float
    """Images a second, eager."""
    compiled: float | None
    """Images a second with `compile.decoder`; None if nothing was compiled."""
    compile_seconds: float | None
    """The first call, which compiles, or finds what an earlier run has left in the cache."""
    published: float
    """Images a second one by one in float32."""
    published_bf16: float
    difference: float
    """Mean absolute one between the pixel values of ours and of one by one in bfloat16."""
    difference_compiled: float | None

    @property
    def best(self) -> float:
        return max(self.ours, self.compiled or 0.0)


def model_of(case: Case, device: torch.device) -> DiffusionModel:
    """The product's model around a random autoencoder, without a transformer."""
    torch.manual_seed(0)
    with device:
        module: Any = case.autoencoder(**case.settings).to(torch.bfloat16).eval()
    config = Model(
        family=case.family.FAMILY,
        path=case.title,
        dtype="bfloat16",
        resolution=case.resolution,
        max_sequence_length=77,
        schedule=SigmaSchedule(kind="linear"),
        lora=Lora(targets=[]),
        decoding=Decoding(micro_batch=case.at_once),
    )
    spread(module, device)
    transformer = {"in_channels": case.settings["latent_channels"], "joint_attention_dim": 4096}
    return case.family(config, device, {"vae": module}, transformer_config=transformer, vae_config=module.config)


def spread(autoencoder: Any, device: torch.device) -> None:
    """Scale the last convolution so that pictures use the range of 8 bits: else every way gives the same grey."""
    last = [module for module in autoencoder.decoder.modules() if isinstance(module, nn.Conv2d)][-1]
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(1, autoencoder.config["latent_channels"], 8, 8, generator=generator).to(device, torch.bfloat16)
    with torch.no_grad():
        last.weight.mul_(0.5 / autoencoder.decode(noise, return_dict=False)[0].float().std().item())


def published_way(decoder: Any, latents: Tensor, preprocess: Callable[[Image.Image], Tensor]) -> Tensor:
    """One by one: decode, Pillow, preprocess there, back to the device."""
    settings, dtype = decoder.config, next(decoder.parameters()).dtype
    scaling, shift = settings.get("scaling_factor") or 1.0, settings.get("shift_factor") or 0.0
    inputs = []
    for latent in latents:
        image = decoder.decode((latent[None] / scaling + shift).to(dtype), return_dict=False)[0]
        image = (image.float() / 2 + 0.5).clamp(0, 1)[0].permute(1, 2, 0).cpu().numpy()
        inputs.append(preprocess(Image.fromarray((image * 255).round().astype(np.uint8))))
    return torch.stack(inputs).to(latents.device)


def pillow_clip(picture: Image.Image) -> Tensor:
    """CLIP's preprocessing of a square picture."""
    resized = np.asarray(picture.resize((CLIP_SIZE, CLIP_SIZE), Image.Resampling.BICUBIC), dtype=np.float32) / 255
    pixels = (resized - np.array(CLIP_MEAN, np.float32)) / np.array(CLIP_STD, np.float32)
    return torch.from_numpy(pixels).permute(2, 0, 1)


@torch.no_grad()
def measure(name: str, case: Case, device: torch.device, *, compiled: bool) -> Measured:
    model = model_of(case, device)
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(case.images, *model.latent_shape, generator=generator).to(device)
    preprocessing = Preprocessing.torchvision(CLIP_SIZE, interpolation="bicubic", eight_bit=True)
    single = copy.deepcopy(model.decoder).float()

    def ours() -> Tensor:
        return preprocessing(model.decode(latents))

    _, eager = timed(ours, device)
    few = latents[: max(2, case.images // 4)]
    _, bfloat16 = timed(lambda: published_way(model.decoder, few, pillow_clip), device)
    seconds = medians(
        {
            "ours": ours,
            "published": lambda: published_way(single, few, pillow_clip),
            "published_bf16": lambda: published_way(model.decoder, few, pillow_clip),
        },
        device,
    )
    compile_seconds = compiled_rate = difference_compiled = None
    # After the eager ways, which use the same module.
    if compiled and not compile_decoder(model.decoder, Compile(decoder=True), device).startswith("no"):
        compile_seconds, pixels = timed(ours, device)
        difference_compiled = (pixels - eager).abs().mean().item()
        compiled_rate = case.images / medians({"compiled": ours}, device)["compiled"]
    return Measured(
        case=name,
        images=case.images,
        at_once=case.at_once,
        ours=case.images / seconds["ours"],
        compiled=compiled_rate,
        compile_seconds=compile_seconds,
        published=len(few) / seconds["published"],
        published_bf16=len(few) / seconds["published_bf16"],
        difference=(eager[: len(few)] - bfloat16).abs().mean().item(),
        difference_compiled=difference_compiled,
    )


def medians(ways: dict[str, Callable[[], Tensor]], device: torch.device) -> dict[str, float]:
    """Seconds of each way: one warm-up each, then in turn."""
    for way in ways.values():
        timed(way, device)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, way in ways.items():
            times[name].append(timed(way, device)[0])
    return {name: statistics.median(found) for name, found in times.items()}


def timed(way: Callable[[], Tensor], device: torch.device) -> tuple[float, Tensor]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    result = way()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, result


def show(result: Measured, title: str) -> None:
    compiled = "   –   " if result.compiled is None else f"{result.compiled:7.1f}"
    print(
        f"{title:<42} eager {result.ours:7.1f}   compiled {compiled}   published {result.published:7.1f}"
        f"   in bfloat16 {result.published_bf16:7.1f} images/s   {result.best / result.published:5.1f} x"
        f"   differ by {result.difference:.1e}",
        flush=True,
    )


def write(results: list[Measured], device: torch.device, cases: dict[str, Case], out: Path, *, tiny: bool) -> None:
    out.mkdir(parents=True, exist_ok=True)
    content = {
        "question": "images a second from clean latents to a reward's pixel values, ours and the published way",
        "statistic": f"median of {REPEATS} after warm-ups, ways in turn",
        "device": device_name(device),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "published": "one image at a time, decoded in float32, through Pillow; and the same in bfloat16",
        "small_autoencoders": tiny,
        "titles": {result.case: cases[result.case].title for result in results},
        "results": [
            asdict(result)
            | {
                "ratio": round(result.best / result.published, 2),
                "ratio_bf16": round(result.best / result.published_bf16, 2),
            }
            for result in results
        ],
    }
    (out / "decode_throughput.json").write_text(json.dumps(content, indent=1) + "\n")


def small(case: Case) -> Case:
    return Case(
        title=f"{case.title.partition(',')[0]}, small, {TINY_RESOLUTION} px",
        family=case.family,
        autoencoder=case.autoencoder,
        settings=case.settings | SMALL[case.autoencoder],
        resolution=TINY_RESOLUTION,
        images=4,
        at_once=2,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--eager", action="store_true", help="do not compile: a minute less a case")
    parser.add_argument("--tiny", action="store_true", help="small autoencoders, to try the script")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    cases = {name: small(case) for name, case in CASES.items()} if arguments.tiny else CASES
    print(f"{device_name(device)}, torch {torch.__version__}")
    results: list[Measured] = []
    for name in arguments.cases:
        results.append(measure(name, cases[name], device, compiled=not arguments.eager))
        show(results[-1], cases[name].title)
        write(results, device, cases, arguments.out, tiny=arguments.tiny)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch._dynamo.reset()


if __name__ == "__main__":
    main()
