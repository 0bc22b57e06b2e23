"""Draws docs/images/{iteration,gpu_memory,worker,revision}.svg from the descriptions below: `make reference`.

A test compares the files with the output of this script. Lengths are in pixels of a page's column, 760 wide.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "images"
WIDTH = 760
STYLE = """
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",Arial,sans-serif}
text{font-size:13px;fill:#424a53}
.head{font-size:15px;font-weight:600;fill:#1f2328}.middle{text-anchor:middle}.end{text-anchor:end}
.page{fill:#ffffff}.plain{fill:#f6f7f9;stroke:#8a929b}.low{fill:#fdf0d2;stroke:#b87f00}.full{fill:#dcedf8;stroke:#0072b2}
.gone{fill:#fbe3d6;stroke:#d55e00}
path{fill:none;stroke:#424a53;stroke-width:1.6}.weights{stroke:#009e73;stroke-width:2}.proof{stroke-dasharray:5 4}
.tip{fill:#424a53;stroke:none}.green{fill:#009e73}
@media (prefers-color-scheme: dark){text{fill:#b6bec7}.head{fill:#e4e8ed}.page{fill:#0d1117}
.plain{fill:#171b21;stroke:#59636e}.low{fill:#3b2e0e;stroke:#e9ad2c}.full{fill:#10293b;stroke:#4ea6dd}
.gone{fill:#3d1d0c;stroke:#f0803c}path{stroke:#b6bec7}.weights{stroke:#2fc79a}.tip{fill:#b6bec7}.green{fill:#2fc79a}}
"""


@dataclass(frozen=True, slots=True)
class Box:
    x: int
    y: int
    width: int
    height: int
    kind: str
    """``plain``, ``low`` (low precision), ``full`` (full precision) or ``gone``."""
    head: str
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Arrow:
    points: str
    """Path in SVG's syntax: ``M 10 20 H 50``."""
    kind: str = ""
    """Empty, ``weights`` or ``proof`` (dashed)."""


@dataclass(frozen=True, slots=True)
class Note:
    x: int
    y: int
    lines: tuple[str, ...]
    anchor: str = "middle"
    """Alignment of the lines at x: ``middle``, ``start`` or ``end``."""


@dataclass(frozen=True, slots=True)
class Picture:
    title: str
    """The description for screen readers."""
    height: int
    parts: tuple[Box | Arrow | Note, ...]


PICTURES = {
    "iteration": Picture(
        "One iteration. Encoders embed prompts. Explorers rank seeds in low precision. The selector chooses the "
        "best and the worst. Regenerators sample these seeds again in full precision. The learner group updates the "
        "policy and publishes a revision to explorers and regenerators.",
        430,
        (
            Box(
                10,
                10,
                740,
                52,
                "plain",
                "controller",
                ("chooses prompts, hands out units, awaits one step after another",),
            ),
            Box(10, 112, 150, 92, "plain", "encoders", ("embed each prompt", "once")),
            Box(
                270,
                112,
                200,
                92,
                "low",
                "explorers",
                ("96 seeds per prompt,", "6 steps, NVFP4 or FP8;", "images stay here"),
            ),
            Box(
                590,
                112,
                160,
                92,
                "plain",
                "selector",
                ("keeps the 12 best and", "the 12 worst of each", "prompt; journal"),
            ),
            Box(560, 310, 190, 92, "full", "regenerators", ("the same 24 seeds,", "10 steps, BF16,", "scored again")),
            Box(270, 310, 200, 92, "full", "learner group", ("advantages, one update", "of the LoRA factors")),
            Box(10, 310, 150, 92, "plain", "run folder", ("checkpoint, journal,", "samples")),
            Arrow("M 160 158 H 266"),
            Note(214, 150, ("embeddings",)),
            Arrow("M 470 158 H 586"),
            Note(529, 136, ("one number", "per seed")),
            Arrow("M 670 204 V 306"),
            Note(680, 260, ("chosen", "seeds"), "start"),
            Arrow("M 560 356 H 474"),
            Note(516, 334, ("samples,", "rewards")),
            Arrow("M 270 356 H 164"),
            Note(217, 348, ("checkpoint",)),
            Arrow("M 340 310 V 208", "weights"),
            Note(330, 256, ("revision v + 1:", "packed weights", "or factors"), "end"),
            Arrow("M 420 310 V 262 H 610 V 306", "weights"),
            Note(515, 252, ("revision v + 1: factors",)),
        ),
    ),
    "gpu_memory": Picture(
        "Contents of a GPU's memory in each stage. Base, copy of the layers LoRA modifies, policies, decoder and "
        "rewards are permanent. Text encoders are loaded while prompts are encoded. The explorer's quantised copy "
        "exists while exploring and regenerating, activations while learning.",
        334,
        (
            Note(100, 20, ("encode",)),
            Note(287, 20, ("explore",)),
            Note(473, 20, ("regenerate",)),
            Note(660, 20, ("learn, publish",)),
            Box(
                10,
                32,
                740,
                44,
                "full",
                "base, in BF16",
                ("as loaded; merged with a policy to regenerate; restored to learn",),
            ),
            Box(10, 86, 740, 44, "plain", "copy of the layers LoRA modifies", ("restores the base exactly",)),
            Box(10, 140, 740, 44, "plain", "policies, optimiser, decoder, rewards", ("loaded once for all roles",)),
            Box(
                10,
                194,
                180,
                130,
                "plain",
                "text encoders",
                ("one batch of prompts;", "dropped when all", "prompts are encoded"),
            ),
            Box(197, 194, 366, 60, "low", "quantised copy", ("made when exploring begins,", "freed before learning")),
            Box(197, 264, 180, 60, "low", "a micro-batch", ("of previews, with", "their decoding")),
            Box(383, 264, 180, 60, "full", "a micro-batch", ("of samples, with", "their decoding")),
            Box(
                570,
                194,
                180,
                130,
                "full",
                "activations",
                ("of a micro-batch; then", "merging factors for", "the next revision"),
            ),
        ),
    ),
    "worker": Picture(
        "The states of a worker: waiting, starting, stale, ready. A new revision makes a ready worker stale. A worker "
        "that must leave drains. A lost worker does not return; a replacement with a new name begins at waiting.",
        330,
        (
            Box(10, 70, 140, 92, "plain", "waiting", ("for a place in", "the cluster")),
            Box(210, 70, 140, 92, "plain", "starting", ("loads, attests its", "tier, compiles")),
            Box(410, 70, 140, 92, "plain", "stale", ("loads the revision", "and proves it")),
            Box(610, 70, 140, 92, "full", "ready", ("gets units of the", "revision it holds")),
            Arrow("M 150 116 H 206"),
            Note(178, 108, ("placed",)),
            Arrow("M 350 116 H 406"),
            Note(378, 108, ("started",)),
            Arrow("M 550 116 H 606"),
            Note(578, 108, ("proved",)),
            Arrow("M 680 70 V 36 H 480 V 66", "weights"),
            Note(580, 28, ("a new revision is published",)),
            Box(
                410,
                228,
                340,
                74,
                "plain",
                "draining",
                ("finishes its units, gets no more,", "then leaves"),
            ),
            Arrow("M 680 162 V 224"),
            Arrow("M 480 162 V 224"),
            Note(580, 196, ("must leave, in any state",)),
            Box(
                10,
                228,
                300,
                74,
                "gone",
                "lost",
                ("its units go to others; a new worker", "takes its place: explorer-0 → explorer-0.1"),
            ),
            Arrow("M 280 162 V 224"),
            Note(290, 196, ("dies or hangs, in any state",), "start"),
            Arrow("M 80 228 V 166", "proof"),
            Note(90, 196, ("replacement",), "start"),
        ),
    ),
    "revision": Picture(
        "The path of a revision: the learner ranks merge, round and quantise the sampling policy. The payload with its "
        "checksums goes through the object store to explorers and regenerators, which answer with receipts. The "
        "controller compares the receipts before it hands out units.",
        440,
        (
            Box(10, 10, 210, 92, "full", "learner ranks", ("after update v, old follows", "default: factors A and B")),
            Box(280, 10, 210, 92, "full", "merge", ("W0 + s·B A in FP64,", "rounded once to BF16")),
            Box(550, 10, 200, 92, "low", "quantise", ("NVFP4, with the global", "scale of the base, or FP8")),
            Arrow("M 220 56 H 276", "weights"),
            Arrow("M 490 56 H 546", "weights"),
            Box(
                280,
                160,
                470,
                74,
                "plain",
                "payload in the object store",
                ("packed weights or factors; a manifest", "with a checksum of each tensor"),
            ),
            Arrow("M 650 102 V 156", "weights"),
            Box(280, 296, 210, 74, "low", "explorers", ("write into their buffers", "in place")),
            Box(540, 296, 210, 74, "full", "regenerators", ("merge the factors", "themselves")),
            Arrow("M 385 234 V 292", "weights"),
            Note(395, 268, ("packed weights",), "start"),
            Arrow("M 645 234 V 292", "weights"),
            Note(655, 268, ("factors",), "start"),
            Box(10, 296, 210, 74, "plain", "controller", ("receipts agree: sends", "units of this revision")),
            Arrow("M 280 333 H 224", "proof"),
            Note(250, 325, ("receipt",)),
            Arrow("M 645 370 V 404 H 115 V 374", "proof"),
            Note(385, 424, ("receipt: changed modules, digests of the buffers and of a test forward",)),
        ),
    ),
}


def svg(picture: Picture) -> str:
    size = f"0 0 {WIDTH} {picture.height}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img" aria-labelledby="title">',
        f'<title id="title">{escape(picture.title)}</title>',
        f"<style>{STYLE}</style>",
        tip("tip", ""),
        tip("weights", "green"),
        f'<rect class="page" width="{WIDTH}" height="{picture.height}"/>',
    ]
    for part in picture.parts:
        lines += drawn(part)
    return "\n".join([*lines, "</svg>"]) + "\n"


def tip(name: str, kind: str) -> str:
    """An arrow's head."""
    size = 'viewBox="0 0 10 10" refX="9" refY="5" markerWidth="10" markerHeight="10" markerUnits="userSpaceOnUse"'
    return f'<marker id="{name}" {size} orient="auto"><path class="tip {kind}" d="M0 0L10 5L0 10z"/></marker>'


def drawn(part: Box | Arrow | Note) -> Iterator[str]:
    if isinstance(part, Arrow):
        name = "weights" if part.kind == "weights" else "tip"
        yield f'<path class="{part.kind}" d="{part.points}" marker-end="url(#{name})"/>'
    elif isinstance(part, Note):
        for number, line in enumerate(part.lines):
            yield text(part.x, part.y + 16 * number, part.anchor, line)
    else:
        place = f'x="{part.x}" y="{part.y}" width="{part.width}" height="{part.height}"'
        yield f'<rect class="{part.kind}" {place} rx="8"/>'
        middle, top = part.x + part.width // 2, part.y + (part.height - 18 * (1 + len(part.lines))) // 2 + 14
        yield text(middle, top, "middle head", part.head)
        for number, line in enumerate(part.lines, start=1):
            yield text(middle, top + 18 * number, "middle", line)


def text(x: int, y: int, kind: str, line: str) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(line)}</text>'


if __name__ == "__main__":
    for name, picture in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(svg(picture), encoding="utf-8")
        print(FOLDER / f"{name}.svg")
