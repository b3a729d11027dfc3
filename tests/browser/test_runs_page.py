"""The list of runs in a browser."""

from __future__ import annotations

from tests.browser.conftest import Tab


def test_the_list_of_runs_is_accessible_at_both_widths_in_both_themes(tab: Tab) -> None:
    tab.inspect("/", "runs")


def test_the_list_is_used_with_the_keyboard(tab: Tab) -> None:
    page = tab.goto("/")
    page.keyboard.press("j")
    page.keyboard.press("j")
    second = page.locator("[data-rows] > tr").nth(1).locator("a").first
    assert second.evaluate("link => link === document.activeElement")
