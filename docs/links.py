"""Hooks of MkDocs for links from a page to files outside of docs/, which the site does not contain.

In the repository such links work unchanged. On the site they lead to the repository if mkdocs.yml has `repo_url`;
otherwise the path is shown without a link. Images of benchmarks/results are copied to the site. A missing file is a
warning, which ``--strict`` turns into an error.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

log = logging.getLogger("mkdocs.hooks.links")
CODE_OR_LINK = re.compile(
    r"^```.*?^```|`[^`\n]+`|(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s#]+)(?:#[^)\s]*)?\)",
    re.DOTALL | re.MULTILINE,
)


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the benchmarks' plots to the site's files."""
    root = Path(config.docs_dir).resolve().parent
    for picture in sorted(root.glob("benchmarks/results/*.png")):
        name = picture.relative_to(root).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any, **_: Any) -> str:
    """Return the page with its links to files outside docs/ replaced. Code stays unchanged."""
    docs = Path(config.docs_dir).resolve()
    here = posixpath.dirname(page.file.src_uri)

    def replaced(match: re.Match[str]) -> str:
        picture, text, target = match["picture"], match["text"], match["target"]
        if not target or "://" in target or target.startswith("/"):
            return match[0]
        file = Path(os.path.normpath(docs / here / target))
        if file.is_relative_to(docs):
            return match[0]
        path = file.relative_to(docs.parent).as_posix()
        if picture and files.get_file_from_path(path):
            return f"![{text}]({posixpath.relpath(path, here or '.')})"
        if picture or not file.exists():
            log.warning("%s links to %s, which the site cannot show", page.file.src_uri, target)
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path})"
        return text if file.name in text else f"{text} (`{path}`)"

    return CODE_OR_LINK.sub(replaced, markdown)
