"""The documentation as a site: it is built without a warning, without a network, and has what pages link to."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def built(repository: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    variables = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=repository, env=variables, capture_output=True, text=True, check=False)


def test_the_site_is_built_without_a_warning_and_fetches_nothing_when_it_is_read(tmp_path: Path) -> None:
    done = built(ROOT, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {page.relative_to(tmp_path).with_suffix(".md") for page in tmp_path.rglob("*.html")} - {Path("404.md")}
    assert pages == {page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")}
    loaded = [
        (page.name, address)
        for page in tmp_path.rglob("*.html")
        for address in re.findall(r"<(?:script|img|link)[^>]*(?:src|href)=\"?([^\">\s]+)", page.read_text())
        if "://" in address
    ]
    assert loaded == []


def test_links_that_leave_the_pages_lead_to_the_repository_or_are_shown_as_paths(tmp_path: Path) -> None:
    page = "# A\n\n[a file](../there.py), [`x` too](../there.py#L1) and `[no link](../there.py)`: [none](../gone.py)\n"
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(page)
    (tmp_path / "there.py").touch()
    shutil.copy(ROOT / "docs" / "links.py", tmp_path / "docs")
    settings = "site_name: a\nhooks: [docs/links.py]\nexclude_docs: '*.py'\ntheme: {name: material, font: false}\n"
    (tmp_path / "mkdocs.yml").write_text(settings)
    done = built(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    assert "index.md links to ../gone.py" in done.stdout + done.stderr

    (tmp_path / "docs" / "index.md").write_text(page.partition(": [none]")[0])
    for repository, shown in (
        ("", "a file (<code>there.py</code>), <code>x</code> too (<code>there.py</code>)"),
        ("https://example.org/me/it", '<a href="https://example.org/me/it/blob/main/there.py">a file</a>'),
    ):
        (tmp_path / "mkdocs.yml").write_text(settings + f"repo_url: {repository}\n" * bool(repository))
        assert built(tmp_path, tmp_path / "site").returncode == 0
        assert shown in (tmp_path / "site" / "index.html").read_text()
