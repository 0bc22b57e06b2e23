"""Selects drawings from the emoji packages, with their names, and chooses the held-out concepts.

A *concept* is an emoji without its skin tone, in any style. Skin tones and flags are thinned out, as they would
otherwise make up most of the images. A concept is held out with its images of all styles, and only if each word of its
name also occurs in names of other concepts, so that a model can know the words.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STYLES = {
    "noto": "@iconify-json/noto@1.2.9",
    "blob": "@iconify-json/noto-v1@1.2.5",
    "fluent": "@iconify-json/fluent-emoji@1.2.7",
    "flat": "@iconify-json/fluent-emoji-flat@1.2.6",
    "twemoji": "@iconify-json/twemoji@1.2.5",
    "emojione": "@iconify-json/emojione@1.2.3",
    "firefox": "@iconify-json/fxemoji@1.2.2",
}
"""Style name in captions → npm package. Sets with a share-alike licence are left out (OpenMoji, the first EmojiOne)."""
NAMES = "emojibase-data@17.0.0"
"""npm package with English names and tags."""
TONES = ("light", "medium light", "medium", "medium dark", "dark")
FLAG_GROUP = 9
FLAGS = 10
"""One flag in FLAGS is used."""
HELD_OUT = 100
KNOWN = 3
"""Minimum number of other concepts that share each word of a held-out concept's name."""
MOST_OF_A_CATEGORY = 4
"""Maximum number of held-out concepts per category."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A drawing by one of the sets' authors."""

    name: str
    """Name of the concept: ``red apple``."""
    category: str
    """``food fruit``."""
    tags: tuple[str, ...]
    style: str
    tone: str
    """Skin tone, one of `TONES`; empty for the default."""
    held_out: bool
    svg: str

    @property
    def mirrors(self) -> bool:
        """True if the mirrored image fits the same name: no letters, and no left or right in the name."""
        words = {"left", "right", "facing", "leftwards", "rightwards", "clockwise", "counterclockwise"}
        kinds = {"face", "cat", "monkey", "person", "animal", "plant", "food", "drink", "place", "transport"}
        mirrored = self.category.split()[0] in kinds and self.category != "transport sign"
        return mirrored and not words & set(re.split(r"[\s-]", self.name))


def collect(folders: Mapping[str, Path], names: Path) -> list[Drawing]:
    """The drawings of unpacked packages, in an order that depends only on their contents.

    Args:
        folders: style → folder ``package`` of its npm package.
        names: the folder of `NAMES`.
    """
    emoji = json.loads((names / "en" / "data.json").read_text())
    groups = json.loads((names / "meta" / "groups.json").read_text())["subgroups"]
    spelled = _spellings(folders.values(), names, emoji)
    entries = {}
    for entry in emoji:
        entries[_code(entry["hexcode"])] = (entry, "")
        for skin in entry.get("skins", []):
            if not isinstance(skin["tone"], list):  # a list: two people with different tones
                entries[_code(skin["hexcode"])] = (entry, TONES[skin["tone"] - 1])
    found: dict[tuple[str, str, str], Drawing] = {}
    for style, folder in folders.items():
        icons = json.loads((folder / "icons.json").read_text())
        for icon, content in icons["icons"].items():
            entry, tone = entries.get(spelled.get(_plain(icon), ""), (None, ""))
            if entry is None or not _kept(entry, tone, style):
                continue
            category = groups[str(entry["subgroup"])].replace("-", " ") if "subgroup" in entry else "symbol"
            text = dict(name=entry["label"].lower(), category=category, tags=tuple(entry.get("tags", [])))
            drawn = Drawing(**text, style=style, tone=tone, held_out=False, svg=_svg(content, icons))
            found.setdefault((drawn.name, style, tone), drawn)
    drawings = [found[key] for key in sorted(found)]
    held_out = choose_held_out({each.name: each.category for each in drawings})
    return [Drawing(**{**asdict(each), "held_out": each.name in held_out}) for each in drawings]


def choose_held_out(categories: Mapping[str, str], count: int = HELD_OUT) -> set[str]:
    """Choose `count` names to hold out from `categories` (name → category)."""
    known = Counter(word for name in categories for word in set(words(name)))
    chosen: set[str] = set()
    of_category: Counter[str] = Counter()
    for name in sorted(categories, key=_number):
        if len(chosen) == count:
            break
        if of_category[categories[name]] == MOST_OF_A_CATEGORY or len(words(name)) < 2:
            continue
        if all(known[word] > KNOWN for word in words(name)):
            chosen.add(name)
            of_category[categories[name]] += 1
            known.subtract(set(words(name)))
    return chosen


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9’']+", text.lower())


def save(drawings: Sequence[Drawing], file: Path) -> None:
    lines = "".join(json.dumps(asdict(each)) + "\n" for each in sorted(drawings, key=lambda each: each.style))
    file.write_bytes(lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME))


def read(file: Path) -> list[Drawing]:
    lines = lzma.decompress(file.read_bytes()).decode().splitlines()
    return [Drawing(**{**row, "tags": tuple(row["tags"])}) for row in map(json.loads, lines)]


def attribution(folders: Mapping[str, Path], names: Path) -> str:
    """A Markdown page with authors and licences of the images and names."""
    lines = ["# Authors of the emoji", "", "Rendered smaller, on white; otherwise unchanged.", ""]
    for style, folder in folders.items():
        info = json.loads((folder / "info.json").read_text())
        author, licence = info["author"], info["license"]
        lines.append(
            f"- `{style}`: [{info['name']}]({author['url']}) by {author['name']}, "
            f"[{licence['title']}]({licence['url']}), from `{STYLES.get(style, style)}`"
        )
    data = json.loads((names / "package.json").read_text())
    lines.append(f"- names, tags and categories: `{NAMES}`, {data['license']}, from Unicode CLDR (Unicode License v3)")
    return "\n".join(lines) + "\n"


def _spellings(folders: Iterable[Path], names: Path, emoji: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Icon name → code points: names stated by the packages, then labels, then other common names."""
    found: dict[str, str] = {}
    for folder in folders:
        file = folder / "chars.json"
        for code, icon in (json.loads(file.read_text()) if file.exists() else {}).items():
            found.setdefault(_plain(icon), _code(code))
    for entry in emoji:
        found.setdefault(_plain(entry["label"]), _code(entry["hexcode"]))
    others = defaultdict(list)
    for file in sorted((names / "en" / "shortcodes").glob("*.json")):
        for code, short in json.loads(file.read_text()).items():
            for each in short if isinstance(short, list) else [short]:
                others[_plain(each)].append(_code(code))
    for name, codes in others.items():
        found.setdefault(name, codes[0])
    return found


def _kept(entry: Mapping[str, Any], tone: str, style: str) -> bool:
    if entry.get("group") == FLAG_GROUP:
        return _number(entry["label"]) % FLAGS == 0
    return not tone or tone == TONES[_number(f"{entry['label']} {style}") % len(TONES)]


def _svg(icon: Mapping[str, Any], icons: Mapping[str, Any]) -> str:
    left, top = icon.get("left", 0), icon.get("top", 0)
    width, height = (icon.get(key, icons.get(key, 16)) for key in ("width", "height"))
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<svg {spaces} viewBox="{left} {top} {width} {height}">{icon["body"]}</svg>'


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _code(code: str) -> str:
    """The code without the variation selector for colour, which some lists include and others omit."""
    return "-".join(part for part in code.upper().split("-") if part != "FE0F")


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
