"""Renders the templates in `templates`; formats numbers and times for them."""

from __future__ import annotations

import math
from base64 import b64encode
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from solrl_ray.common.files import replace_file
from solrl_ray.config.problems import counted


def digits(value: float) -> str:
    """Format a reward or its error: three decimals, or two significant digits if it is below 0.001."""
    if not math.isfinite(value):
        return "undefined"
    return f"{value:.3f}" if value == 0 or abs(value) >= 0.001 else f"{value:.1e}"


def signed(value: float) -> str:
    """Format like `digits`, always with a sign (a true minus)."""
    return ("−" if value < 0 else "+") + digits(abs(value))


def clock(seconds: float) -> str:
    """Format a duration in seconds: ``48.2 s``, ``2 min 50 s``, ``3 h 05 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {whole_seconds:02d} s"


def markdown(text: object) -> Markup:
    """Escape text for Markdown and for HTML inside it: on one line, with special characters as character references."""
    line = " ".join(str(text).split())
    return Markup("".join(f"&#{ord(letter)};" if letter in "\\`*_{}[]<>|#~$&!" else letter for letter in line))


def link(address: str) -> Markup:
    """Escape an address for Markdown's ``<…>``, which ends at a space or ``>`` and allows no character references."""
    return Markup(quote(address, safe=":/?#[]@!$&'()*+,;=%~"))


_FILTERS = {
    "base64": lambda text: b64encode(text.encode()).decode(),
    "clock": clock,
    "digits": digits,
    "link": link,
    "markdown": markdown,
    "of": counted,
    "percent": lambda share: f"{100 * share:.1f} %",
    "signed": signed,
    "tenths": "{:.1f}".format,
    "thousands": "{:,}".format,
}


@cache
def _templates() -> Environment:
    """The template environment; cached, so that each template is compiled once."""
    templates = Environment(
        loader=PackageLoader("solrl_ray.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= _FILTERS
    return templates


def rendered(template: str, **values: Any) -> str:
    """Render `template` with `values`, escaped for HTML."""
    return _templates().get_template(template).render(values)


def write_page(path: Path, template: str, **values: Any) -> None:
    """Render `template` with `values` and write the page atomically."""
    replace_file(path, rendered(template, **values).encode())
