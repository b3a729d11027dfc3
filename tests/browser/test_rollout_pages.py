"""The pages of rollouts, credit and tasks in a browser: both widths and themes, the keyboard, and what a hostile agent wrote."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from lightning_core.tools.view.server import open_view
from tests.browser.conftest import Tab
from tests.tools.view.recorded_run import make_run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run ``sample`` of `recorded_run.make_run`."""
    folder = tmp_path_factory.mktemp("recorded")
    # Playwright has an event loop on the main thread.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(make_run, folder).result()
    return folder


@pytest.fixture
def sample(browser: Browser, recorded: Path, screenshots: Path) -> Iterator[Tab]:
    """A tab on ``recorded``. The test fails if a page reports an error in the console, or if a text of the agent ran."""
    with open_view(recorded) as url:
        tab = Tab(browser, url, screenshots)
        tab.page.on("dialog", lambda dialog: tab.errors.append(f"a script of the agent ran: {dialog.message}"))
        yield tab
        tab.close()
    assert tab.errors == []


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("rollouts", "/runs/sample/rollouts"),
        ("rollout", "/runs/sample/rollouts/2"),
        ("rollout-without-spans", "/runs/sample/rollouts/9"),
        ("rollout-of-judge", "/runs/sample/rollouts/10"),
        ("credit", "/runs/sample/credit?rewards=broadcast&advantage=grpo&step=all"),
        ("tasks", "/runs/sample/tasks"),
        ("task", "/runs/sample/task?id=%3Cscript%3Etask%3C/script%3E/1"),
    ],
)
def test_the_page_is_accessible_at_both_widths_in_both_themes(sample: Tab, name: str, path: str) -> None:
    sample.inspect(path, name)


def test_a_call_is_accessible_with_every_coloring(sample: Tab) -> None:
    page = sample.goto("/runs/sample/rollouts/2")
    page.get_by_role("link", name="Open call 2").click()
    path = page.url.partition("127.0.0.1")[2].partition("/")[2]
    for color in ("text", "logprob", "advantage", "change"):
        page.get_by_role("radio", name=color).check()
        sample.inspect(f"/{path}", f"call-{color}")


def test_tokens_are_colored_and_read_with_the_keyboard(sample: Tab) -> None:
    page = sample.goto("/runs/sample/rollouts/2")
    strip = page.locator(".strip").first
    strip.wait_for()
    expect(strip).to_contain_text("<tool_call>")
    expect(page.locator(".message .tool-call").first).to_be_hidden()
    colors = set()
    for color in ("logprob", "advantage", "change"):
        page.get_by_role("radio", name=color).check()
        colors.add(strip.locator(".t").nth(1).evaluate("token => getComputedStyle(token).backgroundColor"))
    assert len(colors) == 3
    strip.focus()
    page.keyboard.press("End")
    tip = page.locator("#token")
    expect(tip).to_contain_text("token83 of 83id257logprob-0.0101probability0.990advantage+0.1875change+0.0500")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    expect(tip).to_contain_text("token2 of 83")
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()
    strip.locator(".t").nth(4).hover()
    expect(tip).to_contain_text("token5 of 83")
    page.get_by_role("radio", name="text").check()
    expect(strip).to_be_hidden()
    expect(page.locator(".message .tool-call").first).to_be_visible()


def test_the_tree_leads_to_the_calls_with_the_keyboard(sample: Tab) -> None:
    page = sample.goto("/runs/sample/rollouts/2")
    for _ in range(3):
        page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page).to_have_url(containing("#call-"))
    expect(page.locator(".row.now")).to_have_count(1)
    page.keyboard.press("n")
    expect(page).to_have_url(containing("/rollouts/3"))


def test_repeated_messages_and_credit_open(sample: Tab) -> None:
    page = sample.goto("/runs/sample/rollouts/2")
    history = page.locator("details.history")
    history.locator("summary").click()
    expect(history).to_contain_text("<img src=x onerror=alert(1)>")
    credit = page.locator("details.why").first
    credit.locator("summary").first.click()
    expect(credit).to_contain_text("4 calls of 4 attempts")


def test_the_parameters_of_the_chosen_rule_are_sent(sample: Tab) -> None:
    page = sample.goto("/runs/sample/credit")
    gamma = page.locator("[name='rewards.discounted.gamma']")
    expect(gamma).to_be_visible()
    page.get_by_label("reward rule").select_option("gigpo")
    expect(gamma).to_be_hidden()
    page.locator("[name='rewards.gigpo.gamma']").fill("0.9")
    page.get_by_role("button", name="Compare").click()
    expect(page).to_have_url(containing("rewards=gigpo&rewards.gigpo.gamma=0.9"))
    assert "rewards.discounted" not in page.url
    expect(page.get_by_role("heading", name="8 calls of step 2")).to_be_visible()


def test_the_list_is_filtered_and_sorted(sample: Tab) -> None:
    page = sample.goto("/runs/sample/rollouts")
    page.keyboard.press("/")
    page.keyboard.type("naïve")
    page.keyboard.press("Enter")
    expect(page.locator("[data-rows] tr")).to_have_count(10)
    page.get_by_role("link", name="reward").click()
    expect(page).to_have_url(containing("text=na%C3%AFve&sort=reward"))
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page).to_have_url(containing("/rollouts/"))
    expect(page.get_by_role("heading", level=1)).to_contain_text("Rollout")


def test_many_rollouts_open(big_tab: Tab) -> None:
    page = big_tab.goto("/runs/big/rollouts")
    expect(page.locator("main")).to_contain_text("1–50 of 100,000")
    page.keyboard.press("n")
    expect(page.locator("main")).to_contain_text("51–100 of 100,000")


def containing(part: str) -> re.Pattern[str]:
    return re.compile(re.escape(part))
