"""Every relative link of a page leads to a file that is there, and to a heading that it has."""

from __future__ import annotations

import re
from pathlib import Path

from tests.checkout import tracked

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.as_posix() for path in tracked() or () if path.suffix == ".md") or ["README.md"]
LINK = re.compile(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"")


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def anchors(page: Path) -> set[str]:
    """What GitHub calls the page's headings in a link."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    for name in PAGES:
        page = ROOT / name
        for link in (one or other for one, other in LINK.findall(prose(page))):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists() and target.is_relative_to(ROOT), f"{name} links to {link}, which is not there"
            assert not anchor or anchor in anchors(target), f"{name} links to {link}, and there is no such heading"


def test_the_readme_links_to_every_page_of_docs():
    linked = set(re.findall(r"\]\((docs/[\w-]+\.md)\)", prose(ROOT / "README.md")))
    assert linked == {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}


def test_the_readme_is_one_screen():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 66
