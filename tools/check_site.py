"""Checks a built site: `python tools/check_site.py build/site`.

Every link within the site leads to a file and, where it has one, to an anchor. No page, style sheet or manifest loads
anything from the network; links that a reader follows may lead there. The theme's script would load mermaid for a
drawing in its language, and figures of a repository from GitHub: neither element may be there.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("object", "data"), ("embed", "src"),
          ("link", "href"), ("video", "src"), ("audio", "src")}
STYLE_URL = re.compile(r"""(?:url\(|@import\s+)["']?((?:https?:)?//[^"')\s]+)""")


class Page(HTMLParser):
    """Ids, links and loaded files of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.scripted: list[str] = []  # elements for which the theme's script asks the network
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is None:
                continue
            if name in ("id", "name"):
                self.ids.add(value)
            if (name == "class" and "mermaid" in value.split()) or (name, value) == ("data-md-component", "source"):
                self.scripted.append(value)
            if (tag, name) in LOADED:
                self.loaded.append(value)
            elif (tag, name) == ("a", "href"):
                self.links.append(value)


def is_outside(link: str) -> bool:
    parts = urlsplit(link)
    return bool(parts.netloc) or parts.scheme not in ("", "data")


def target(site: Path, page: Path, link: str) -> tuple[Path, str]:
    """The file that a link of a page leads to, and its anchor."""
    parts = urlsplit(link)
    path = unquote(parts.path)
    if not path:
        return page, unquote(parts.fragment)
    found = (site / path.lstrip("/") if path.startswith("/") else page.parent / path).resolve()
    return (found / "index.html" if found.is_dir() else found), unquote(parts.fragment)


def faults(site: Path) -> list[str]:
    """One line for each link that leads nowhere and for each file that would come from the network."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = [] if pages else [f"{site}: no pages"]
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        found += [f"{name}: loads {link}" for link in page.loaded if is_outside(link)]
        found += [f"{name}: the theme's script loads what '{element}' needs" for element in page.scripted]
        for link in page.links + page.loaded:
            if is_outside(link) or link.startswith("data:"):
                continue
            file, anchor = target(site, path, link)
            if not file.exists():
                found.append(f"{name}: {link} leads to no file")
            elif anchor and file in pages and anchor not in pages[file].ids:
                found.append(f"{name}: {link} leads to no anchor")
    for path in sorted([*site.rglob("*.css"), *pages]):
        found += [f"{path.relative_to(path.anchor)}: loads {url}" for url in STYLE_URL.findall(path.read_text("utf-8"))]
    return found


if __name__ == "__main__":
    wrong = faults(Path(sys.argv[1]))
    print("\n".join(wrong) or "every link leads somewhere, and nothing is loaded from the network")
    sys.exit(bool(wrong))
