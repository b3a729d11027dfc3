"""Credit with other rules: forms from the registries, the run's own messages for bad values, numbers as on the command line."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from lightning_core import load_config
from lightning_core.credit import ADVANTAGE_RULES, GROUP_KEYS, REWARD_RULES
from lightning_core.records.store import Store
from lightning_core.tools.runs.recredit import compare_agents, most_changed, recredit
from lightning_core.tools.view.scatter import SIZE, make_scatter, make_ticks
from tests.tools.view.made_runs import make_run
from tests.tools.view.pages import Seen, browsing, is_harmless
from tests.tools.view.recorded_run import AGENT

PAGE = "/runs/sample/credit"


def test_the_form_offers_every_rule_with_its_parameters(sample: httpx.Client) -> None:
    seen = Seen(sample.get(PAGE).text)
    for rule in (*REWARD_RULES.values(), *ADVANTAGE_RULES.values()):
        assert "".join(rule.description.replace("`", "").split()) in "".join(seen.text.split())
    names = {a["name"] for tag in ("input", "select") for a in seen.all(tag) if a.get("name")}
    for kind, registry in (("rewards", REWARD_RULES), ("advantage", ADVANTAGE_RULES)):
        assert {f"{kind}.{r.name}.{p}" for r in registry.values() for p in r.parameters} <= names
    groups = {a["value"] for a in seen.all("input") if a.get("name") == "group"}
    assert groups == set(GROUP_KEYS)
    chosen = [a for a in seen.all("input") if a.get("name") == "rewards.discounted.gamma"]
    assert [a["value"] for a in chosen] == ["0.5"]
    enabled = [a["data-rule"] for a in seen.all("fieldset") if "data-rule" in a and "disabled" not in a]
    assert enabled == ["discounted", "dr-grpo"]


def test_the_rules_of_the_run_change_nothing(sample: httpx.Client) -> None:
    text = Seen(sample.get(PAGE).text).text
    assert "8 calls of step 2" in text
    assert "No advantage changes." in text
    assert f"{AGENT} 8 0.281 0.281 1.000 0 0 0" in text


@pytest.mark.parametrize(
    ("query", "overrides"),
    [
        ("rewards=broadcast&advantage=grpo", ["credit.rewards=broadcast", "credit.gamma=null", "credit.advantage=grpo"]),
        ("rewards=discounted&rewards.discounted.gamma=1&rewards.gigpo.gamma=9", ["credit.gamma=1"]),
        ("rewards=gigpo&rewards.gigpo.gamma=0.5&rewards.gigpo.step_weight=2&rewards.gigpo.anchor=normalised&group=task",
         ["credit.rewards=gigpo", "credit.step_weight=2", "credit.anchor=normalised", "credit.group_by=[task]"]),
        ("rewards=explicit&group=task&group=agent&step=1",
         ["credit.rewards=explicit", "credit.gamma=null", "credit.group_by=[task, agent]"]),
        ("advantage=none", ["credit.advantage=none"]),
    ],
)  # fmt: skip
def test_the_page_has_the_numbers_of_the_command(
    sample: httpx.Client, sample_folder: Path, query: str, overrides: list[str]
) -> None:
    run = sample_folder / "sample"
    with Store(run / "store.db", read_only=True) as store:
        changes = recredit(store, 1 if "step=1" in query else 2, load_config(run / "config.yaml", overrides))
    html = sample.get(f"{PAGE}?{query}").raise_for_status().text
    (agent,) = compare_agents(changes)
    correlation = "–" if agent.correlation is None else f"{agent.correlation:.3f}"
    row = f"{AGENT} 8 {agent.before:.3f} {agent.after:.3f} {correlation} {agent.flipped} {agent.from_zero} {agent.to_zero}"
    assert row in Seen(html).text
    listed = re.findall(r'/rollouts/(\d+)#call-([0-9a-f]{16})">', html)
    assert listed == [(str(c.ordinal), c.trained.call) for c in most_changed(changes, 25)]
    assert is_harmless(html)


def test_all_steps_are_compared(sample: httpx.Client) -> None:
    assert "16 calls of 2 steps" in Seen(sample.get(f"{PAGE}?step=all").text).text


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("rewards=discounted", "'discounted' needs credit.gamma, such as gamma: 0.95"),
        ("rewards=discounted&rewards.discounted.gamma=2", "credit.gamma: found 2, expected less than or equal to 1"),
        ("rewards=discounted&rewards.discounted.gamma=<i>", "credit.gamma: found '<i>', expected a number"),
        ("rewards=broadcast&rewards.broadcast.depth=3", "'broadcast' has no argument 'depth'"),
        ("rewards=broadcast&rewards.broadcast.x=[1", "rewards.broadcast.x: found '[1', expected a number or a word"),
        ("rewards=gae&rewards.gae.gamma=0.9&advantage=none", "'gae' needs a critic's values, which are available in training only"),
        ("rewards=os:system", "rewards: found 'os:system', expected one of broadcast"),
        ("advantage=os:system", "advantage: found 'os:system', expected one of grpo"),
        ("rewards=broadcast&group=os:system", "group_by: found 'os:system', expected one of task"),
        ("rewards=broadcast&group=task&group=task", "credit.group_by: expected one or more different keys"),
        ("step=0", "step: found '0', expected 'all' or one of the steps with credit: 1 to 2"),
        ("step=-", "step: found '-', expected 'all'"),
        ("steps=1", "steps: unknown parameter, expected one of policy, rewards, advantage, step, import, group"),
        ("policy=other", "policy: found 'other', expected one of policy"),
    ],
)  # fmt: skip
def test_a_wrong_value_gets_the_configurations_message(sample: httpx.Client, query: str, message: str) -> None:
    response = sample.get(f"{PAGE}?{query}")
    assert response.status_code == 400
    assert message in Seen(response.text).text
    assert is_harmless(response.text)


def test_a_run_without_credit_has_a_form_and_no_numbers(tmp_path: Path) -> None:
    make_run(tmp_path / "new", rollouts=[], config={"run": {"name": "new"}})
    with browsing(tmp_path) as client:
        text = Seen(client.get("/runs/new/credit").raise_for_status().text).text
    assert "This run has no credited calls." in text
    assert "reward rule" in text


def test_the_plot_has_one_scale_and_joins_equal_calls(sample_folder: Path) -> None:
    run = sample_folder / "sample"
    with Store(run / "store.db", read_only=True) as store:
        changes = recredit(store, 2, load_config(run / "config.yaml"))
    plot = make_scatter(changes)
    assert sum(dot.calls for dot in plot.dots) == 8
    assert len(plot.dots) < 8
    assert all(dot.x == pytest.approx(SIZE - dot.y) for dot in plot.dots)
    assert {label: place for place, label in plot.ticks}["0"] == pytest.approx(plot.zero)
    assert make_scatter([]).dots == []
    assert make_ticks(-1.0, 1.0) == [-1, -0.5, 0, 0.5, 1]
    assert make_ticks(0.0, 1000.0) == [0, 200, 400, 600, 800, 1000]
