"""The list of runs and the comparison in a browser."""

from __future__ import annotations

import json

from playwright.sync_api import Page, expect

from tests.browser.conftest import Tab, violations


def has_focus(page: Page, selector: str) -> bool:
    return page.locator(selector).first.evaluate("element => element === document.activeElement")


def test_the_list_of_runs_is_accessible_at_both_widths_in_both_themes(tab: Tab) -> None:
    tab.inspect("/", "runs")


def test_a_phone_shows_the_rewards_of_the_runs(tab: Tab) -> None:
    page = tab.page
    page.set_viewport_size({"width": 390, "height": 900})
    row = tab.goto("/").locator('tr[data-run="bandit"]')
    cells = [cell for cell in row.locator("td").all() if cell.is_visible()]
    assert [float(cell.inner_text()) > 0 for cell in cells[-3:]] == [True] * 3, "training, held-out, improvement"
    assert all((box := cell.bounding_box()) is not None and box["x"] + box["width"] <= 390 for cell in cells)


def test_runs_are_selected_and_compared_with_the_keyboard_alone(tab: Tab) -> None:
    page = tab.goto("/?sort=name&ascending=1")
    expect(page.get_by_role("button", name="Compare: select at least 2 runs")).to_be_disabled()
    page.keyboard.press("j")
    assert has_focus(page, "[data-rows] tr:nth-child(1) a")
    page.keyboard.press("x")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("j")
    page.keyboard.press("k")
    assert has_focus(page, "[data-rows] tr:nth-child(2) a")
    page.keyboard.press("j")
    page.keyboard.press("x")
    expect(page.get_by_role("button", name="Compare 2 runs")).to_be_enabled()
    page.keyboard.press("c")
    page.wait_for_url("**/compare?run=bandit&run=other")
    assert page.get_by_role("heading", level=1).inner_text() == "Compare 2 runs"


def test_a_row_is_opened_and_the_list_is_searched_with_the_keyboard(tab: Tab) -> None:
    page = tab.goto("/")
    page.keyboard.press("/")
    page.keyboard.type("two_bandits zzz")
    page.keyboard.press("Enter")
    expect(page.get_by_text("No run matches.")).to_be_visible()
    page.keyboard.press("/")
    page.keyboard.type("two_bandits")
    page.keyboard.press("Enter")
    expect(page.locator("[data-rows] tr")).to_have_count(1)
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.wait_for_url("**/runs/two")


def test_the_keys_are_listed(tab: Tab) -> None:
    page = tab.goto("/")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("compare the selected runs")
    assert violations(page) == []
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()


def test_the_theme_is_chosen_and_kept(tab: Tab) -> None:
    page = tab.goto("/runs/bandit")
    background = "getComputedStyle(document.body).backgroundColor"
    line = "document.querySelector('[data-chart=entropy] canvas').toDataURL()"
    light, drawn = page.evaluate(background), page.evaluate(line)
    page.get_by_role("button", name="Switch between light and dark").click()
    dark = page.evaluate(background)
    assert dark != light
    tab.until(f"{line} !== {json.dumps(drawn)}")
    assert tab.goto("/").evaluate(background) == dark


def test_the_comparison_is_accessible_and_draws_every_run(tab: Tab) -> None:
    path = "/compare?run=bandit&run=other&run=two"
    tab.inspect(path, "compare")
    page = tab.goto(path)
    legend = page.locator("[data-chart=reward] .legend")
    assert legend.locator("button").all_inner_texts() == ["bandit", "other", "two"]
    assert page.locator("table.settings tr", has_text="trainer.learning_rate").inner_text().split()[1:3] == [
        "0.005",
        "0.001",
    ]


def test_a_line_is_hidden_and_shown_again(tab: Tab) -> None:
    page = tab.goto("/compare?run=bandit&run=other")
    button = page.locator("[data-chart=entropy] .legend button").first
    pixels = "document.querySelector('[data-chart=entropy] canvas').toDataURL()"
    before = page.evaluate(pixels)
    button.click()
    expect(button).to_have_attribute("aria-pressed", "false")
    tab.until(f"{pixels} !== {json.dumps(before)}")
    button.click()
    page.mouse.move(0, 0)
    tab.until(f"{pixels} === {json.dumps(before)}")
