"""The page of a run in a browser, also of one that is running."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from lightning_core.records.report import MetricsLog
from lightning_core.records.run_folder import lock
from lightning_core.tools.cli.view import page_to
from lightning_core.tools.view.server import open_view
from tests.browser.conftest import Tab, violations
from tests.browser.real_runs import GatedRun
from tests.tools.view.made_runs import HOSTILE, make_run

LONG = 120_000
"""Milliseconds that training may take on a machine with other work."""


@pytest.mark.parametrize("name", ["bandit", "two", "hostile"])
def test_the_page_of_a_run_is_accessible_at_both_widths_in_both_themes(tab: Tab, name: str) -> None:
    tab.inspect(f"/runs/{name}", f"run-{name}")


def table(page: Page, chart: str) -> list[str]:
    """The rows of a chart's table, as text."""
    return [" ".join(row.split()) for row in page.locator(f"[data-chart={chart}] tbody tr").all_inner_texts()]


def open_table(page: Page, chart: str) -> None:
    page.locator(f"[data-chart={chart}] summary").click()
    expect(page.locator(f"[data-chart={chart}] tbody tr").first).to_be_visible()


def test_a_chart_has_a_table_with_its_values(tab: Tab) -> None:
    page = tab.goto("/runs/bandit")
    open_table(page, "reward")
    rows = table(page, "reward")
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "3", "4"]
    assert re.fullmatch(r"4 [\d.]+ \[[\d.]+, [\d.]+\] [\d.]+ \[[\d.]+, [\d.]+\]", rows[-1]), (
        "training and held-out, with intervals"
    )
    assert (
        page.locator("[data-chart=reward] [role=img]")
        .get_attribute("aria-label", timeout=1000)
        .startswith("Reward by step. training: ")
    )
    assert violations(page) == []


def test_the_cursor_shows_the_values_of_its_step_in_every_chart(tab: Tab) -> None:
    page = tab.goto("/runs/bandit")
    box = page.locator("[data-chart=entropy] .u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 1, box["y"] + box["height"] / 2)
    for chart in ("entropy", "reward"):
        expect(page.locator(f"[data-chart={chart}] .value").first).to_have_text(re.compile("· step 1$"))


def test_a_loss_that_is_noise_is_no_chart_until_it_is_opened(tab: Tab) -> None:
    page = tab.goto("/runs/bandit")
    loss = page.locator("[data-chart=loss]")
    expect(loss).to_be_hidden()
    page.get_by_text(re.compile(r"^No change: .*\bloss \(0\)")).click()
    expect(loss.locator("canvas")).to_be_visible()
    assert violations(page) == []


def test_the_result_and_the_sections_are_first_on_every_page_of_a_run(tab: Tab) -> None:
    sections = ["Overview", "Rollouts", "Tasks", "Credit"]
    for path in ("", "/rollouts", "/tasks", "/credit", "/rollouts/1"):
        page = tab.goto(f"/runs/bandit{path}")
        assert page.get_by_role("navigation", name="This run").get_by_role("link").all_inner_texts() == sections, path
    page.keyboard.press("o")
    page.wait_for_url("**/runs/bandit")
    assert "held-out reward" in page.locator("#status > :first-child").inner_text()


def test_other_metrics_are_drawn_when_they_are_opened(tab: Tab) -> None:
    page = tab.goto("/runs/two")
    assert page.locator("[data-other-charts] canvas").count() == 0
    page.get_by_text("Other metrics").click()
    chart = page.locator("[data-chart=other-grad_norm]")
    expect(chart.locator("canvas")).to_be_visible()
    assert chart.locator(".legend button").all_inner_texts() == ["first", "second"]
    assert violations(page) == []


def test_the_configuration_is_searched(tab: Tab) -> None:
    page = tab.goto("/runs/bandit")
    page.keyboard.press("/")
    page.keyboard.type("trainer RATE")
    expect(page.locator("#settings tr:visible")).to_have_count(2)
    expect(page.get_by_role("status")).to_have_text("2 found")
    assert "trainer.learning_rate" in page.locator("#settings tr:visible").first.inner_text()


def test_the_ledger_comes_after_the_page(tab: Tab) -> None:
    page = tab.goto("/runs/bandit")
    assert "talker" in page.locator("#routing td").first.inner_text()


def test_hostile_text_is_shown_and_not_executed(tab: Tab) -> None:
    page = tab.goto("/runs/hostile")
    assert "no </script><script>window.hacked=N</script>" in page.locator(".health code").first.inner_text()
    for path in ("/", "/runs/hostile", "/compare?run=hostile&run=bandit", f"/?q={HOSTILE}"):
        page = tab.goto(path)
        assert page.evaluate("window.hacked") is None


@pytest.fixture
def running(runs: Path, model: Path, request: pytest.FixtureRequest) -> Iterator[GatedRun]:
    """A run that is running: real training, in another thread."""
    run = GatedRun(runs, model, request.node.name)
    with ThreadPoolExecutor(1) as thread:
        training = thread.submit(run.train)
        yield run
        run.allow(run.steps)
        training.result()


def test_the_row_of_a_running_run_is_followed_without_a_reload(tab: Tab, running: GatedRun) -> None:
    page = tab.goto("/")
    row = page.locator(f'tr[data-run="{running.name}"]')
    page.evaluate("window.loaded = 1")
    expect(row).to_contain_text("running", timeout=LONG)
    row.get_by_role("checkbox").check()
    running.allow(2)
    expect(row).to_contain_text("2 / 4", timeout=LONG)
    expect(row.get_by_role("checkbox")).to_be_checked()
    running.allow(2)
    expect(row).to_contain_text("finished", timeout=LONG)
    assert page.evaluate("window.loaded") == 1


def test_the_charts_of_a_running_run_grow_without_a_reload(tab: Tab, running: GatedRun) -> None:
    running.allow(1)
    expect(tab.goto("/").locator(f'tr[data-run="{running.name}"]')).to_contain_text("1 / 4", timeout=LONG)
    page = tab.goto(f"/runs/{running.name}")
    page.evaluate("window.loaded = 1")
    open_table(page, "reward")
    rows = page.locator("[data-chart=reward] tbody tr")
    expect(rows).to_have_count(1)
    for step in (2, 3):
        running.allow(1)
        expect(rows).to_have_count(step, timeout=LONG)
        expect(page.locator("#status")).to_contain_text(f"{step} of 4")
    running.allow(1)
    expect(page.locator("#status .state")).to_have_text("finished", timeout=LONG)
    expect(rows).to_have_count(4)
    assert page.evaluate("window.loaded") == 1


def set_hidden(page: Page, hidden: bool) -> None:
    """Tell ``page`` that its tab is hidden or shown."""
    value = str(hidden).lower()
    page.evaluate(
        f"Object.defineProperty(document, 'hidden', {{value: {value}, configurable: true}}); "
        "document.dispatchEvent(new Event('visibilitychange'))"
    )


def test_a_hidden_tab_holds_no_connection(tab: Tab, running: GatedRun) -> None:
    """Browsers allow six to one host, for all tabs together."""
    page = tab.goto("/")
    set_hidden(page, True)
    for _ in range(8):
        other = tab.new_page()
        other.goto(page.url)
        expect(other.locator("[data-rows] tr").first).to_be_visible()
        set_hidden(other, True)


def test_a_tab_that_was_hidden_while_its_run_was_resumed_shows_no_discarded_step(
    browser: Browser, tmp_path: Path, screenshots: Path
) -> None:
    folder = make_run(tmp_path / "runs" / "resumed", metrics=[{"reward": step / 10} for step in range(1, 4)])
    log = MetricsLog(folder / "metrics.jsonl", keep_steps=3)
    with lock.running(folder), open_view(tmp_path / "runs") as url:
        tab = Tab(browser, url, screenshots)
        page = tab.goto("/runs/resumed")
        log.append(4, {"reward": 0.4})
        open_table(page, "reward")
        rows = page.locator("[data-chart=reward] tbody tr")
        expect(rows).to_have_count(4, timeout=LONG)
        set_hidden(page, True)
        log = MetricsLog(folder / "metrics.jsonl", keep_steps=2)
        for step in range(3, 6):
            log.append(step, {"reward": 0.9})
        with page.expect_event("load", timeout=LONG):
            set_hidden(page, False)
        open_table(page, "reward")
        assert table(page, "reward") == ["1 0.1", "2 0.2", "3 0.9", "4 0.9", "5 0.9"]
        tab.close()
    assert tab.errors == []


def test_the_file_that_the_command_opens_leads_to_the_runs(browser: Browser, tmp_path: Path) -> None:
    """A browser sends no strict cookie with a redirect that began at a file."""
    make_run(tmp_path / "runs" / "one")
    with open_view(tmp_path / "runs") as url:
        page = browser.new_page()
        page.goto(page_to(url, tmp_path).as_uri())
        expect(page.locator("[data-rows] tr")).to_have_count(1)
        expect(page).to_have_url(url.partition("?")[0])
        page.close()
