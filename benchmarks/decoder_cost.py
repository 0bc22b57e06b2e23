"""What does a preview's decoder cost: the whole one, left early, or a small one?

    python benchmarks/decoder_cost.py [--device cuda] [--compiled] [--out FOLDER]

Floating-point operations of one image, counted on the meta device, so without weights, memory or a GPU. With
`--device` the same decoders, with random weights in bfloat16, are timed as well: images a second, the median of 5 after
warm-ups, 4 at once. `entry`: left right after the upsampling to that size; `end`: after all layers of that size
(`early_exit.py`). `small`: an `AutoencoderTiny` of the published size (TAEF1, TAESD3); SANA's has two more levels.
`narrow`: DC-AE with three quarters of its channels, which stands for DC-AE-Lite, as in `rollout.py`. Prints a table;
writes decoder_cost.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from architectures import DC_AE, kl_autoencoder
from diffusers import AutoencoderDC, AutoencoderKL, AutoencoderTiny
from early_exit import Where, truncated
from torch.utils.flop_counter import FlopCounterMode

from solrl_ray.quantization.attestation import device_name

RESULTS = Path(__file__).parent / "results"
AT_ONCE, REPEATS = 4, 5
NARROW = {"decoder_block_out_channels": (96, 192, 384, 384, 768, 768)}
"""What `rollout.py` takes for DC-AE-Lite: three quarters of the channels."""
EXITS: tuple[tuple[int, Where], ...] = ((2, "end"), (2, "entry"), (4, "end"), (4, "entry"), (8, "end"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    title: str
    autoencoder: Any
    settings: dict[str, Any]
    latents: tuple[int, int, int]
    levels: int
    """Of the small decoder: each but the last doubles the size."""


KL = kl_autoencoder(1.0, 0.0)
CASES = {
    "sana_1024": Case(
        title="SANA (DC-AE), 1024 px", autoencoder=AutoencoderDC, settings=DC_AE, latents=(32, 32, 32), levels=6
    ),
    "sd3_1024": Case(
        title="SD3.5 (AutoencoderKL), 1024 px", autoencoder=AutoencoderKL, settings=KL, latents=(16, 128, 128), levels=4
    ),
    "flux_512": Case(
        title="FLUX.1 (AutoencoderKL), 512 px", autoencoder=AutoencoderKL, settings=KL, latents=(16, 64, 64), levels=4
    ),
}


def tiny(case: Case) -> Any:
    """TAESD with as many levels as the latents need: three blocks of each size, one of the last."""
    more, width = case.levels - 4, (64,) * case.levels
    return AutoencoderTiny(
        encoder_block_out_channels=width,
        decoder_block_out_channels=width,
        num_encoder_blocks=(1,) * (more + 1) + (3, 3, 3),
        num_decoder_blocks=(3,) * more + (3, 3, 3, 1),
        latent_channels=case.latents[0],
    )


def decoders(case: Case, device: str) -> Iterator[tuple[str, Any]]:
    with torch.device(device):
        whole = case.autoencoder(**case.settings).to(torch.bfloat16).eval()
        small = tiny(case).to(torch.bfloat16).eval()
    yield "whole", whole
    for divisor, where in EXITS:
        yield f"1/{divisor} {where}", truncated(whole, divisor, where)
    yield "small", small
    if case.autoencoder is AutoencoderDC:
        with torch.device(device):
            yield "narrow", AutoencoderDC(**case.settings | NARROW).to(torch.bfloat16).eval()


@torch.no_grad()
def count(decoder: Any, shape: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
    """TFLOP of one image, and the shape of what is decoded."""
    with FlopCounterMode(display=False) as counter:
        decoded = decoder.decode(torch.empty(1, *shape, device="meta", dtype=torch.bfloat16), return_dict=False)[0]
    return counter.get_total_flops() / 1e12, tuple(decoded.shape[1:])


@torch.no_grad()
def images_a_second(decoder: Any, shape: tuple[int, ...], device: str, compiled: bool) -> float:
    latents = torch.randn(AT_ONCE, *shape, device=device, dtype=torch.bfloat16)
    decode = torch.compile(decoder.decode) if compiled else decoder.decode
    seconds = []
    for repeat in range(2 + REPEATS):
        _wait(device)
        started = time.perf_counter()
        decode(latents, return_dict=False)
        _wait(device)
        if repeat >= 2:
            seconds.append(time.perf_counter() - started)
    return AT_ONCE / statistics.median(seconds)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="", help="time them there as well")
    parser.add_argument("--compiled", action="store_true", help="what is timed is compiled first")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("| decoder | left | gives | TFLOP | share | images/s |")
    print("|---|---|---|---|---|---|")
    for name in arguments.cases:
        case, base = CASES[name], 0.0
        timed = dict(decoders(case, arguments.device)) if arguments.device else {}
        for way, decoder in decoders(case, "meta"):
            tflop, shape = count(decoder, case.latents)
            base = base or tflop
            rate = images_a_second(timed[way], case.latents, arguments.device, arguments.compiled) if timed else None
            rows.append({"case": name, "way": way, "shape": shape, "tflop": tflop, "images_a_second": rate})
            shown = "–" if rate is None else f"{rate:.1f}"
            gives = " × ".join(str(side) for side in shape)
            print(f"| {case.title} | {way} | {gives} | {tflop:.3f} | {tflop / base:.3f} | {shown} |", flush=True)
    result: dict[str, Any] = {"torch": torch.__version__, "results": rows}
    if arguments.device:
        device = device_name(torch.device(arguments.device))
        result |= {"device": device, "compiled": arguments.compiled, "images_at_once": AT_ONCE}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "decoder_cost.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
