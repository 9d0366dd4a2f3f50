"""The README and the pages of docs/: their code runs, and what they link to is there."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from unittest.mock import patch

import pytest

from quarflow.bases import BASES
from quarflow.models import REGISTRY
from quarflow.nn.activations import ACTIVATIONS

ROOT = Path(__file__).resolve().parent.parent
PAGES = {str(p.relative_to(ROOT)): p for p in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def run(page: Path) -> None:
    """All code blocks of a page, in order, in one namespace; fails with the page and the line."""
    text, names = page.read_text(), {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        # Empty lines in front, so that line numbers are those of the page.
        source = "\n" * text.count("\n", 0, block.start(1)) + block.group(1)
        try:
            exec(compile(source, str(page), "exec", dont_inherit=True), names)
        except Exception as error:  # noqa: BLE001 (whatever it is, it is the page's)
            lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(page)]
            line = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else lines[-1]
            pytest.fail(f"{page.name}:{line}: {type(error).__name__}: {error}")


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if BLOCK.search(page.read_text())])
def test_code_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # What a page adds to the registries stays there no longer than the page.
    with patch.dict(ACTIVATIONS), patch.dict(BASES), patch.dict(REGISTRY):
        run(PAGES[name])


def test_a_failure_names_page_and_line(tmp_path: Path) -> None:
    for code, line in (("x = 1\nassert x == 2\n", 5), ("x = 1\nx = = 2\n", 5), ("def f():\n    1 / 0\n\nf()\n", 5)):
        page = tmp_path / "page.md"
        page.write_text(f"# Title\n\n```python\n{code}```\n")
        with pytest.raises(pytest.fail.Exception, match=rf"^page\.md:{line}: "):
            run(page)


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    page = PAGES[name]
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{name}: no {target}"
        titles = re.findall(r"^#+ (.+)$", linked.read_text(), re.MULTILINE) if anchor else []
        anchors = [re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles]
        assert not anchor or anchor in anchors, f"{name}: no heading for {target}"
