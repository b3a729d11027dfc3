"""A run of 100,000 rollouts in a browser."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.browser.conftest import Tab


def test_the_page_of_a_big_run_is_drawn_before_its_ledger_is_counted(big_tab: Tab) -> None:
    page = big_tab.page
    page.goto(page.url.rstrip("/") + "/runs/big", wait_until="domcontentloaded")
    expect(page.locator("[data-chart=reward] canvas")).to_be_visible()
    assert "100,000" in page.locator("#status").inner_text()
    assert "100,000" in big_tab.goto("/runs/big").locator("#routing").inner_text()
