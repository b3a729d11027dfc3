"""The page of ``lightning-rl improve`` in a browser."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from playwright.sync_api import Browser, expect

from lightning_core.records.run_folder.lock import running
from lightning_core.tools.view.server import open_view
from tests.browser.conftest import Tab
from tests.tools.view.made_improvement import COMMAND, make_improvement


def test_the_stages_are_accessible_followed_and_copied(browser: Browser, tmp_path: Path, screenshots: Path) -> None:
    folder = tmp_path / "improve-1"
    found = make_improvement(folder)
    with running(folder), open_view(folder) as url:
        tab = Tab(browser, url, screenshots)
        expect(tab.page).to_have_url(url.partition("?")[0])
        tab.inspect("/improve/improve-1", "improve")
        tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page = tab.goto("/improve/improve-1")
        page.locator("li.running").get_by_role("button").click()
        expect(page.locator("li.running").get_by_role("button")).to_have_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()") == COMMAND
        page.evaluate("window.loaded = 1")
        replace(found, best="provider", current=None).write(folder)
        expect(page.locator("li.best h3")).to_contain_text("provider")
        assert page.evaluate("window.loaded") == 1
        tab.close()
    assert tab.errors == []
