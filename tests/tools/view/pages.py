"""Pages over HTTP, and what is in them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

import httpx

from lightning_core.tools.view.server import open_view


@contextmanager
def browsing(folder: Path) -> Generator[httpx.Client]:
    """A client with the token of a viewer of the runs in ``folder``."""
    with open_view(folder) as url, httpx.Client(base_url="/".join(url.split("/")[:3]), follow_redirects=True) as client:
        client.get(url)
        yield client


class Seen(HTMLParser):
    """The text of a page without its white space, and its elements."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._texts: list[str] = []
        self.feed(html)
        self.text = " ".join(" ".join(self._texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self._texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of all elements ``tag``."""
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def links(self) -> list[str]:
        return [attributes["href"] or "" for attributes in self.all("a") if "href" in attributes]


def is_harmless(html: str) -> bool:
    """Whether a page has no element, attribute or script that an agent of `recorded_run` wrote."""
    seen = Seen(html)
    scripts = all(
        a.get("src", "").startswith("/static/") or a.get("type") == "application/json" for a in seen.all("script")
    )  # type: ignore[union-attr]
    attributes = {name for _, given in seen.tags for name in given}
    return (
        scripts
        and not seen.all("i")
        and not seen.all("img")
        and not {a for a in attributes if a.startswith("on") or a == "style"}
    )
