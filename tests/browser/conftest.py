"""A real Chromium, and real runs of the tiny model for it to show. See ``make test-view``.

Each test gets a `Tab`; the page tests call `Tab.inspect` for every page.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

from lightning_core.tools.view.server import open_view
from tests.browser import real_runs
from tests.tools.view.made_runs import make_big_store, make_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WIDTHS = (1280, 390)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs ``bandit`` (held-out tasks), ``other`` (the same with another learning rate), ``two`` (two policies)
    and ``hostile`` (see `hostile_agent`)."""
    # Playwright has an event loop on the main thread, and training needs a thread without one.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(real_runs.make_runs, tmp_path_factory.mktemp("view")).result()


@pytest.fixture(scope="session")
def model(runs: Path) -> Path:
    """The tiny model of ``runs``."""
    return runs.parent / "model"


@pytest.fixture(scope="session")
def big_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one run, ``big``, with 100,000 rollouts of 1,000 steps."""
    folder = tmp_path_factory.mktemp("big")
    make_run(folder / "big", metrics=({"reward": step / 1000, "rollouts": 100} for step in range(1000)))
    make_big_store(folder / "big" / "store.db")
    return folder


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots go: ``$VIEW_SCREENSHOTS``, else a temporary folder."""
    folder = os.environ.get("VIEW_SCREENSHOTS")
    found = Path(folder) if folder else tmp_path_factory.mktemp("screenshots")
    found.mkdir(parents=True, exist_ok=True)
    return found


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium is installed; on Debian: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


class Tab:
    """A browser's tab on the pages of one folder of runs."""

    def __init__(self, browser: Browser, url: str, screenshots: Path) -> None:
        self._context = browser.new_context(viewport={"width": WIDTHS[0], "height": 900}, color_scheme="light")
        self._origin, self._screenshots = "/".join(url.split("/")[:3]), screenshots
        self.errors: list[str] = []
        """What the console reported as errors, and exceptions of scripts."""
        self.page = self.new_page()
        self.page.goto(url)

    def new_page(self) -> Page:
        """One more tab of the same browser."""
        page = self._context.new_page()
        page.on("console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        return page

    def goto(self, path: str) -> Page:
        """Open ``path``, such as ``/runs/bandit``, and wait until it is quiet."""
        self.page.goto(f"{self._origin}{path}")
        self.page.wait_for_load_state("load")
        expect(self.page.locator("[aria-busy=true]")).to_have_count(0, timeout=60_000)
        return self.page

    def inspect(self, path: str, name: str) -> None:
        """Open ``path`` in both themes and widths: screenshots ``name-…``, no violation that axe finds, no page wider than the window."""
        for theme in ("light", "dark"):
            self.page.emulate_media(color_scheme=theme)
            for width in WIDTHS:
                self.page.set_viewport_size({"width": width, "height": 900})
                self.goto(path)
                self.page.wait_for_timeout(100)  # charts are drawn in the next frame
                self.page.screenshot(path=self._screenshots / f"{name}-{theme}-{width}.png", full_page=True)
                excess = self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
                assert excess <= 0, f"{path} is {excess} pixels wider than a window of {width}"
                assert violations(self.page) == [], f"{path}, {theme}, {width} pixels"
        self.page.set_viewport_size({"width": WIDTHS[0], "height": 900})
        self.page.emulate_media(color_scheme="light")

    def until(self, expression: str, value: Any = True) -> None:
        """Wait until a JavaScript expression has ``value``. Playwright's own wait evaluates a string, which the pages forbid."""
        deadline = time.monotonic() + 10
        while (found := self.page.evaluate(expression)) != value:
            assert time.monotonic() < deadline, f"{expression} is still {found!r}, expected {value!r}"
            self.page.wait_for_timeout(50)

    def close(self) -> None:
        self._context.close()


def violations(page: Page) -> list[str]:
    """The rules that axe finds violated, and the first element of each."""
    found: dict[str, Any] = Axe().run(page).response
    return [
        f"{v['id']}: {v['nodes'][0]['html'][:200]} ({v['nodes'][0]['failureSummary']})" for v in found["violations"]
    ]


@pytest.fixture
def tab(browser: Browser, runs: Path, screenshots: Path) -> Iterator[Tab]:
    """A tab on ``runs``. The test fails if a page reports an error in the console."""
    yield from _tab(browser, runs, screenshots)


@pytest.fixture
def big_tab(browser: Browser, big_runs: Path, screenshots: Path) -> Iterator[Tab]:
    """A tab on ``big_runs``."""
    yield from _tab(browser, big_runs, screenshots)


def _tab(browser: Browser, folder: Path, screenshots: Path) -> Iterator[Tab]:
    with open_view(folder) as url:
        tab = Tab(browser, url, screenshots)
        yield tab
        tab.close()
    assert [error for error in tab.errors if not re.search("status of 404|status of 400", error)] == []
