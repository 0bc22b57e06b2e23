"""How fast are weights laid down and taken up again? (docs/decisions/turns-on-a-shared-gpu.md)

    python benchmarks/resting_speed.py [--gb 24] [--out FOLDER]

As many bfloat16 tensors of 8192 x 8192 as FLUX.1-dev has bytes are laid down and taken up three times. The first time
down they are copied to pinned memory of the host; after that a checksum says that they have not changed. Another copy
is changed before each time down, so that it is copied again. Prints seconds and GB/s; writes resting_speed.json into
FOLDER (default benchmarks/results). Aim on one H200: 20 GB/s both ways.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from solrl_ray.models.resting import RestingWeights

HERE = Path(__file__).parent
WIDTH = 8192


def seconds(run: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=24.0)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    device, count = torch.device("cuda", 0), round(arguments.gb * 1e9 / (2 * WIDTH**2))
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "times": []}
    for changes in (False, True):
        tensors = [torch.randn(WIDTH, WIDTH, device=device, dtype=torch.bfloat16) for _ in range(count)]
        size, resting = sum(tensor.nbytes for tensor in tensors) / 1e9, RestingWeights()
        for turn in range(3):
            if changes:
                for tensor in tensors:
                    tensor.add_(0.5)
            down = seconds(partial(resting.lay_down, tensors, device))
            up = seconds(resting.take_up)
            row = {"turn": turn, "changed": changes or turn == 0, "gb": size, "down": down, "up": up}
            found["times"].append(row)
            which = "copied" if row["changed"] else "unchanged"
            print(f"{which:<10} {size:.1f} GB: down {down:.2f} s ({size / down:.1f} GB/s), ", end="")
            print(f"up {up:.2f} s ({size / up:.1f} GB/s)", flush=True)
        tensors.clear()
        torch.cuda.empty_cache()
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "resting_speed.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
