"""The few pieces of HTML that the report is put together from; each says what it escapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape as html_escape


def escape(text: object) -> str:
    """Text made safe for HTML content and quoted attributes."""
    return html_escape(str(text), quote=True)


def element(tag: str, content: str, css: str = "") -> str:
    """One element; `content` is HTML."""
    attribute = f' class="{css}"' if css else ""
    return f"<{tag}{attribute}>{content}</{tag}>"


def digits(value: float) -> str:
    """A reward or its error for display: three decimals, or two digits where three decimals show nothing."""
    if not math.isfinite(value):
        return "undefined"
    return f"{value:.3f}" if value == 0 or abs(value) >= 0.001 else f"{value:.1e}"


def signed(value: float) -> str:
    """Like `digits`, with the sign always shown (a true minus)."""
    return ("−" if value < 0 else "+") + digits(abs(value))


def card(name: str, value: str, more: str) -> str:
    """One headline number; `value` and `more` are plain text."""
    parts = (("name", name), ("value", value), ("more", more))
    return element("div", "".join(element("div", escape(text), css) for css, text in parts), "card")


def figure(title: str, svg: str, note: str) -> str:
    """A plot in a card; `svg` is markup."""
    caption = f"<figcaption>{escape(note)}</figcaption>" if note else ""
    return f'<figure class="card"><h3>{escape(title)}</h3>{svg}{caption}</figure>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table; cells are HTML, headers plain text, columns listed in `numbers` are right-aligned."""

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            element(tag, value, "number" if column in numbers else "") for column, value in enumerate(values)
        )

    head = element("thead", element("tr", cells("th", [escape(name) for name in header])))
    body = element("tbody", "".join(element("tr", cells("td", row)) for row in rows))
    return element("table", head + body)
