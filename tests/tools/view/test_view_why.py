"""The page of a rollout explains the credit that was trained on, or says why it cannot."""

from __future__ import annotations

import re
import sqlite3
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from lightning_core import load_config
from lightning_core import trace as tr
from lightning_core.config import dump_config
from lightning_core.records.store import Store
from tests.tools.view.pages import Seen, browsing
from tests.tools.view.recorded_run import assign_with, make_run, record, root, span, trainable


def credit_of(html: str) -> list[str]:
    """The text of each call's credit."""
    return [
        Seen(part.partition('</details>\n  <details class="call-settings"')[0]).text
        for part in html.split('class="why"')[1:]
    ]


def test_rewards_value_baseline_and_advantage_add_up_to_the_stored_credit(
    sample: httpx.Client, sample_folder: Path
) -> None:
    with Store(sample_folder / "sample" / "store.db", read_only=True) as store:
        stored = {row.call: row for row in store.credit(rollout=2)}
    html = sample.get("/runs/sample/rollouts/2").text
    first, second = credit_of(html)
    # Episode 1, call reward 0.125, an error of a tool -0.25, discount 0.5.
    assert "air: tool <i>search</i> error -0.250" in first
    assert "syntax +0.125" in first
    assert "value +0.312 group +0.125 ± 0.239 → advantage +0.188" in first
    assert "4 calls of 4 attempts" in first
    assert "value +1.125 group +0.750 ± 0.479 → advantage +0.375" in second
    assert "This call has +1.125, which is +0.375 from the mean." in second
    assert "Rule discounted :" in first
    assert "gamma 0.5" in first
    assert sorted(f"{row.advantage:+.3f}" for row in stored.values()) == ["+0.188", "+0.375"]
    assert "These rules now give" not in html
    for ordinal in (1, 2, 3, 4):
        assert re.search(rf'href="/runs/sample/rollouts/{ordinal}#call-[0-9a-f]+"', html)


def test_the_attempts_of_the_group_are_side_by_side(sample: httpx.Client) -> None:
    html = sample.get("/runs/sample/rollouts/2").text
    table = html[html.index('id="attempts"') : html.index("</table>")]
    text = Seen(table).text
    assert "4 attempts at this task in step 1" in text
    assert re.findall(r"\b([1-4]) ([01]\.\d+) ok ([+-]\d\.\d+) … ([+-]\d\.\d+)", text) == [
        ("1", "0.000", "-0.625", "-0.312"),
        ("2", "1.000", "+0.188", "+0.375"),
        ("3", "1.000", "+0.188", "+0.375"),
        ("4", "0.500", "-0.125", "-0.062"),
    ]
    assert text.count("<script>alert(2)</script>") == 4


def test_stored_credit_that_the_rules_do_not_give_is_said(own_runs: Path) -> None:
    with Store(own_runs / "sample" / "store.db") as store:
        store.add_credit([replace(row, advantage=row.advantage + 1) for row in store.credit(rollout=2)])
    with browsing(own_runs) as client:
        changed, other = (credit_of(client.get(f"/runs/sample/rollouts/{n}").text) for n in (2, 3))
        assert "These rules now give +0.187500, the update used +1.187500." in changed[0]
        assert "advantage +1.188" in changed[0]
        assert "These rules now give" not in other[0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            "credit:\n  rewards: gae\n  gamma: 0.9\n  advantage: none\n",
            "The reward rule gae needs the critic's value of each call",
        ),
        ("credit: [\n", "The run's configuration cannot be read"),
        ("credit:\n  rewards: no-such\n", "expected 'broadcast', 'last-call'"),
    ],
)
def test_credit_that_cannot_be_computed_again_is_shown_as_stored(own_runs: Path, config: str, message: str) -> None:
    (own_runs / "sample" / "config.yaml").write_text(f"policy: {{model: any}}\n{config}", encoding="utf-8")
    with browsing(own_runs) as client:
        html = client.get("/runs/sample/rollouts/2").text
    assert message in Seen(html).text
    assert "value +0.312 → advantage +0.188" in credit_of(html)[0]


RULE = "def own_rule(episode):\n    return [episode.reward * 2 for _ in episode.transitions]\n"


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a module ``viewed_rules`` with a reward rule."""
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "viewed_rules.py"
    file.write_text(RULE)
    yield file
    sys.modules.pop("viewed_rules", None)


def test_functions_of_the_user_are_imported_only_when_the_user_says_so(tmp_path: Path, own_module: Path) -> None:
    make_run(tmp_path / "runs", credit={"rewards": "viewed_rules:own_rule", "advantage": "dr-grpo"})
    del sys.modules["viewed_rules"]
    with browsing(tmp_path / "runs") as client:
        html = client.get("/runs/sample/rollouts/2").text
        assert "uses functions of your project: viewed_rules:own_rule" in Seen(html).text
        assert "viewed_rules:own_rule" in Seen(client.get("/runs/sample/credit").text).text
        assert "viewed_rules" not in sys.modules
        assert "?import=yes" in Seen(html).links
        explained = client.get("/runs/sample/rollouts/2?import=yes").text
        assert "value +2.000 group +1.250 ± 0.957 → advantage +0.750" in credit_of(explained)[0]
        assert "calls of 4 attempts" in credit_of(explained)[0]
        assert "32 calls" not in (compared := Seen(client.get("/runs/sample/credit?import=yes").text).text)
        assert "8 calls of step 2" in compared
        assert "No advantage changes." in compared


def test_a_function_that_cannot_be_imported_or_fails_is_a_message(tmp_path: Path, own_module: Path) -> None:
    make_run(tmp_path / "runs", credit={"rewards": "viewed_rules:own_rule", "advantage": "dr-grpo"})
    own_module.write_text("def own_rule(episode):\n    raise KeyError('<i>gone</i>')\n")
    with browsing(tmp_path / "runs") as client:
        del sys.modules["viewed_rules"]
        text = Seen(client.get("/runs/sample/rollouts/2?import=yes").text).text
        assert "The credit cannot be computed again: CreditError: the function 'own_rule' failed:" in text
        assert "KeyError: '<i>gone</i>'" in text
        assert "viewed_rules.py:2" in text
        assert "The stored credit is shown." in text
        response = client.get("/runs/sample/credit?import=yes")
        assert response.status_code == 400
        assert "KeyError: '<i>gone</i>'" in Seen(response.text).text
        own_module.unlink()
        del sys.modules["viewed_rules"]
        text = Seen(client.get("/runs/sample/rollouts/2?import=yes").text).text
        assert "no module 'viewed_rules'" in text


def test_a_rule_that_compares_over_the_batch_is_explained_with_all_tasks(tmp_path: Path) -> None:
    make_run(tmp_path, credit={"advantage": "reinforce++"})
    with browsing(tmp_path) as client:
        html = client.get("/runs/sample/rollouts/2").text
    assert "These rules now give" not in html
    assert "8 calls of 4 attempts" in credit_of(html)[0]


def test_several_policies_are_explained_by_their_own_rules(tmp_path: Path) -> None:
    own = {"agents": ["counter"], "credit": {"advantage": "none"}}
    config = load_config({"policy": {"model": "any"}, "policies": {"first": {"agents": ["talker"]}, "second": own}})
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    with Store(tmp_path / "two" / "store.db") as store:
        for number in (1, 2):
            identity, first = f"{number:032x}", number * 16
            spans = [root(identity), span(identity, first, 0, {tr.OPERATION: "reward", tr.REWARD_VALUE: float(number)})]
            for place, (agent, policy) in enumerate((("talker", "first"), ("counter", "second")), 1):
                spans.append(span(identity, first + place, 0, trainable(place, agent=agent, model=policy)))
            store.add_rollout(record(number, identity, reward=float(number), version=None), spans)
        assign_with(store, 1, config)
    with browsing(tmp_path) as client:
        html = client.get("/runs/two/rollouts/1").text
        talker, counter = credit_of(html)
        assert "Rule grpo :" in talker
        assert "value +1.000 group +1.500 ± 0.707 → advantage -0.707" in talker
        assert "Rule none :" in counter
        assert "value +1.000 → advantage +1.000" in counter
        assert "Baseline" not in counter
        assert "These rules now give" not in html
        text = Seen(client.get("/runs/two/credit?policy=second&rewards=broadcast&advantage=dr-grpo").text).text
        assert "talker 2 0.707 0.707 1.000 0 0 0 counter 2 1.500 0.500 1.000 1 0 0 all 4 1.104 0.604" in text


def test_the_rollouts_of_a_step_are_read_and_explained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path, credit={"advantage": "reinforce++"})
    with sqlite3.connect(tmp_path / "sample" / "store.db") as db:
        db.execute("UPDATE rollouts SET task_id = 'other' WHERE ordinal IN (3, 4)")
    db.close()
    found: list[int] = []
    spans = Store.spans

    def read(self: Store, which: str | int, **options: Any) -> Any:
        found.append(self.rollout(which).ordinal)
        return spans(self, which, **options)

    def explained(number: int) -> list[int]:
        """The rollouts that were read for the page of a rollout, which agrees with the stored credit."""
        found.clear()
        html = client.get(f"/runs/sample/rollouts/{number}").text
        assert "8 calls of 4 attempts" in credit_of(html)[0]
        assert "These rules now give" not in html
        return sorted(found)

    monkeypatch.setattr(Store, "spans", read)
    with browsing(tmp_path) as client:
        assert explained(2) == [1, 2, 3, 4]
        assert explained(1) == [1, 2]
        assert explained(3) == [3, 4]
        config = tmp_path / "sample" / "config.yaml"
        config.write_text(config.read_text(encoding="utf-8").replace("reinforce++", "none"), encoding="utf-8")
        assert "These rules now give" in client.get("/runs/sample/rollouts/2").text
