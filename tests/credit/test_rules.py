"""Declaring rules: the registry, the configuration that uses it, and the pages generated from it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
from annotated_types import Ge

from docs._generate.rules import TABLES, advantage_table, update
from lightning_core import CreditRules, Episode, assign_credit, fit, load_config
from lightning_core.config.build_rules import loss_rule, policy_rules
from lightning_core.credit import (
    ADVANTAGE_RULES,
    GROUP_KEYS,
    Component,
    Value,
    advantage_rule,
    group_key,
    loss,
    reward_rule,
)
from lightning_core.credit.registry import LOSSES, REWARD_RULES
from lightning_core.errors import ConfigError, CreditError, RewardError
from lightning_core.observers.monitors import MONITORS
from lightning_core.records.run_folder.folder import open_run_folder
from tests.credit import own_rules
from tests.credit.episodes import episode

DOCS = Path(__file__).parents[2] / "docs"
EPISODES = [episode("w", 1, "aa"), episode("x", 1), episode("y", 0), episode("z", 0)]


def config(**sections: Any) -> Any:
    return load_config({"policy": {"model": "m"}, **sections})


def rules(**credit: Any) -> CreditRules:
    (only,) = policy_rules(config(credit=credit)).values()
    return only


def test_the_recipe_an_advantage_rule() -> None:
    """One function is configurable, validated and documented."""

    @advantage_rule("max-scaled")
    def max_scaled(groups: list[list[Value]], *, floor: Annotated[float, Ge(0)] = 0.0) -> dict[str, float]:
        """`(v − μ) / d`, with d the largest distance from μ."""
        found: dict[str, float] = {}
        for group in groups:
            mean = sum(v.weight * v.value for v in group) / len({v.rollout for v in group})
            largest = max(abs(v.value - mean) for v in group)
            found |= {v.call: (v.value - mean) / max(largest, floor) for v in group}
        return found

    expected = {"w0": 1, "w1": 1, "x0": 1, "y0": -1, "z0": -1}  # two of four: (1 − 0.5) / 0.5, and (0 − 0.5) / 0.5
    assert assign_credit(EPISODES, CreditRules(advantage="max-scaled")).advantages == expected
    assert assign_credit(EPISODES, CreditRules(advantage=max_scaled)).advantages == expected
    assert assign_credit(EPISODES, rules(advantage="max-scaled")).advantages == expected
    halved = rules(advantage="max-scaled", advantage_args={"floor": 1.0})
    assert assign_credit(EPISODES, halved).advantages == {call: a / 2 for call, a in expected.items()}

    row = "| `max-scaled` | `(v − μ) / d`, with d the largest distance from μ. | `floor`: number ≥ 0, default `0.0` | within groups |"
    assert row in advantage_table().splitlines()
    with pytest.raises(
        ConfigError,
        match=r"found 'maxscaled', expected .*'max-scaled', or 'module:callable'; did you mean 'max-scaled'",
    ):
        rules(advantage="maxscaled")
    with pytest.raises(
        ConfigError, match=r"advantage_args\.flor: 'max-scaled' has no argument 'flor'; expected 'floor'"
    ):
        rules(advantage="max-scaled", advantage_args={"flor": 1.0})
    with pytest.raises(ConfigError, match=r"advantage_args\.floor: found 'high', expected a number"):
        rules(advantage="max-scaled", advantage_args={"floor": "high"})
    with pytest.raises(ConfigError, match=r"advantage_args\.floor: found -1, expected greater than or equal to 0"):
        rules(advantage="max-scaled", advantage_args={"floor": -1})


def test_declared_properties_reach_the_configuration() -> None:
    @advantage_rule("over-all", compares="batch")
    def over_all(groups: list[list[Value]]) -> dict[str, float]:
        """Everything in one group."""
        (group,) = groups
        return {v.call: float(len(group)) for v in group}

    @reward_rule("by-turn", group=("task", "turn"))
    def by_turn(episode: Episode, *, gamma: float, sharpness: float) -> list[float]:
        """Values that depend on two arguments."""
        return [gamma**turn * sharpness * episode.reward for turn in episode.turns]

    @group_key("odd")
    def odd(episode: Episode) -> list[str]:
        """Whether the turn is odd."""
        return [str(turn % 2) for turn in episode.turns]

    found = assign_credit(EPISODES, CreditRules(advantage="over-all", group_by=("task", "agent"))).advantages
    assert set(found.values()) == {5.0}
    config(credit={"advantage": "over-all"}, rollouts={"group_size": 1})
    with pytest.raises(ConfigError, match=r"rollouts\.refill: goes with advantages that compare within groups"):
        config(credit={"advantage": "over-all"}, rollouts={"refill": 1})
    with pytest.raises(ConfigError, match=r"'over-all' compares all rollouts of a step"):
        config(credit={"advantage": "over-all"}, trainer={"name": "verl", "mode": "colocate_async"})
    with pytest.raises(ConfigError, match=r"credit\.rewards: 'by-turn' needs credit\.gamma"):
        config(credit={"rewards": "by-turn", "rewards_args": {"sharpness": 1.0}})
    with pytest.raises(ConfigError, match=r"credit\.rewards: 'by-turn' needs credit\.rewards_args\.sharpness"):
        config(credit={"rewards": "by-turn", "gamma": 0.5})
    with pytest.raises(
        ConfigError, match=r"credit\.rewards_args\.gamma: this argument has its own key; use credit\.gamma"
    ):
        config(credit={"rewards": "by-turn", "gamma": 0.5, "rewards_args": {"gamma": 0.5, "sharpness": 1.0}})
    with pytest.raises(
        ConfigError, match=r"credit\.lam: goes with rewards: gae only, but credit\.rewards is 'by-turn'"
    ):
        config(credit={"rewards": "by-turn", "gamma": 0.5, "lam": 0.5, "rewards_args": {"sharpness": 1.0}})
    declared = rules(rewards="by-turn", gamma=0.5, rewards_args={"sharpness": 2.0})
    assert declared.keys == ("task", "turn")
    assert assign_credit(EPISODES, declared).values == {"w0": 2, "w1": 1, "x0": 2, "y0": 0, "z0": 0}
    assert assign_credit(EPISODES, rules(group_by=["task", "odd"])).metrics["groups"] == 2


def test_a_rule_may_have_parts_that_are_compared_apart() -> None:
    """Outcome and turn rewards normalised separately (MT-GRPO, arXiv 2505.11821), the second with a weight."""

    @reward_rule("two-parts")
    def two_parts(episode: Episode, *, weight: float) -> list[Component]:
        """The return, and the number of the turn among calls of that turn."""
        turns = [float(turn) for turn in episode.turns]
        whole = [episode.reward] * len(turns)
        return [Component(values=whole), Component(values=turns, weight=weight, group_by=("turn",), name="turn")]

    episodes = [episode("x", 1, "aa"), episode("y", 0, "aa")]
    credit = assign_credit(episodes, CreditRules(rewards="two-parts", rewards_args={"weight": 3.0}, advantage="none"))
    assert credit.advantages == {"x0": 1, "x1": 4, "y0": 0, "y1": 3}
    assert credit.values == {"x0": 1, "x1": 1, "y0": 0, "y1": 0}
    assert (credit.metrics["groups"], credit.metrics["turn_groups"]) == (1, 2)


def test_rules_are_module_and_callable() -> None:
    own = rules(
        rewards="tests.credit.own_rules:per_call",
        rewards_args={"penalty": 0.25},
        advantage="tests.credit.own_rules:shifted",
        advantage_args={"by": 1.0},
        group_by=["task", "tests.credit.own_rules:first_turn"],
    )
    credit = assign_credit(EPISODES, own)
    assert credit.values == {"w0": 0.5, "w1": 0.5, "x0": 0.75, "y0": -0.25, "z0": -0.25}
    assert credit.advantages == {call: value + 1 for call, value in credit.values.items()}
    assert credit.metrics["groups"] == 2
    assert assign_credit(EPISODES, rules(rewards="tests.credit.own_rules:with_gamma", gamma=0.5)).values["w0"] == 0.5
    assert assign_credit(EPISODES, rules(rewards="tests.credit.own_rules:with_gamma")).values["w0"] == 1
    assert loss_rule(config(algorithm={"loss": "tests.credit.own_rules:sapo"}).algorithm).name == "sapo"


@pytest.mark.parametrize(
    ("credit", "text"),
    [
        ({"rewards": "tests.credit.own_rules:nothing"}, "credit.rewards: the module 'tests.credit.own_rules' has no 'nothing'"),
        ({"advantage": "tests.credit.own_rules:nothing"}, "credit.advantage: the module 'tests.credit.own_rules' has no 'nothing'"),
        ({"group_by": ["tests.credit.own_rules:nothing"]}, "credit.group_by: the module 'tests.credit.own_rules' has no 'nothing'"),
        ({"group_by": ["tusk"]}, "credit.group_by[0]: found 'tusk', expected 'task', 'agent',"),
        (
            {"rewards": "tests.credit.own_rules:per_call", "rewards_args": {"penalti": 1.0}},
            "credit.rewards_args.penalti: 'per_call' has no argument 'penalti'; expected 'penalty'",
        ),
        (
            {"rewards": "tests.credit.own_rules:per_call", "rewards_args": {"penalty": -1.0}},
            "credit.rewards_args.penalty: found -1.0, expected greater than or equal to 0",
        ),
        (
            {"rewards": "tests.credit.own_rules:per_call", "gamma": 0.5},
            "credit.gamma: goes with rewards: discounted | gigpo | gae | igpo, but "
            "credit.rewards is 'tests.credit.own_rules:per_call'",
        ),
        ({"advantage": "tests.credit.own_rules:shifted"}, "credit.advantage: 'shifted' needs credit.advantage_args.by"),
        ({"advantage_args": {"by": 1.0}}, "credit.advantage_args.by: 'grpo' has no argument 'by'; it takes no arguments"),
    ],
)  # fmt: skip
def test_errors_name_the_key_and_what_was_expected(credit: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        rules(**credit)
    assert text in str(error.value)


def test_the_common_keys_do_not_reach_a_policys_own_rule() -> None:
    credit = {"rewards": "tests.credit.own_rules:per_call", "rewards_args": {"penalty": 0.5}}
    policies = {"p": {"agents": ["a"], "credit": {"rewards": "broadcast"}}, "q": {"agents": ["b"]}}
    found = policy_rules(config(credit=credit, policies=policies))
    assert found["p"].reward_arguments == {}
    assert found["q"].reward_arguments == {"penalty": 0.5}


def test_plain_arguments_without_a_configuration() -> None:
    assert CreditRules(rewards="discounted").reward_arguments == {"gamma": 1.0}
    assert CreditRules(rewards="gae", gamma=0.5, lam=0.25).reward_arguments == {"gamma": 0.5, "lam": 0.25}
    assert CreditRules(rewards="discounted").keys == ("task", "agent", "turn")
    assert CreditRules(rewards="discounted", group_by=("task",)).keys == ("task",)
    with pytest.raises(CreditError, match=r"'grpo' has no argument 'x'; it takes no arguments"):
        CreditRules(advantage_args={"x": 1})
    with pytest.raises(CreditError, match=r"unknown advantage rule 'gpro'; expected one of .*did you mean 'grpo'"):
        CreditRules(advantage="gpro")
    with pytest.raises(CreditError, match="group_by is empty"):
        CreditRules(group_by=())


def test_groups_without_the_task_need_the_whole_step() -> None:
    assert not CreditRules().needs_batch
    assert not CreditRules(group_by=("agent", "task")).needs_batch
    assert not CreditRules(group_by=(GROUP_KEYS["task"].function,)).needs_batch
    assert not CreditRules(advantage="none", group_by=("agent",)).needs_batch, "it does not compare"
    assert CreditRules(advantage="reinforce++").needs_batch
    assert all(CreditRules(group_by=(key,)).needs_batch for key in GROUP_KEYS if key != "task")
    step = [episode("w", 1, task="s"), episode("x", 1, task="s"), episode("y", 0, task="t"), episode("z", 0, task="t")]
    by_agent = CreditRules(group_by=("agent",), advantage="dr-grpo")
    assert assign_credit(step, by_agent).advantages == {"w0": 0.5, "x0": 0.5, "y0": -0.5, "z0": -0.5}


def test_verl_needs_a_synchronous_step_for_functions_that_compare_tasks() -> None:
    """Functions are imported when the rules are resolved, so the configuration itself loads."""
    credit = {"group_by": ["tests.credit.own_rules:first_turn"], "rewards": "tests.credit.own_rules:per_call"}
    functions = {"credit": credit | {"advantage": "tests.credit.own_rules:centred"}, "agent": "a:b"}
    policy_rules(config(**functions, trainer={"name": "verl"}))
    asynchronous = config(**functions, trainer={"name": "verl", "mode": "colocate_async"})
    with pytest.raises(ConfigError, match=r"credit\.group_by: without 'task'"):
        policy_rules(asynchronous)


def returning(found: Any) -> Callable[[Episode], Any]:
    def wrong(episode: Episode) -> Any:
        return found

    return wrong


def test_results_of_own_rules_are_checked() -> None:
    def short(episode: Episode) -> list[str]:
        return ["x"]

    with pytest.raises(CreditError, match="the group key short returned 1 keys for the 2 calls"):
        assign_credit(EPISODES, CreditRules(group_by=(short,)))
    keys: list[tuple[Any, str]] = [
        (None, "None; expected a list"),
        ({"a": 1}, "{'a': 1}; expected a list"),
        ("aa", "'aa'; expected a list"),
        ([[1], [2]], r"\[1\] for a call; expected a text"),
    ]
    for found, message in keys:
        with pytest.raises(CreditError, match=f"the group key wrong returned {message}"):
            assign_credit(EPISODES, CreditRules(group_by=(returning(found),)))
    values: list[tuple[Any, str]] = [
        ({0: 1.0, 1: 2.0}, "{0: 1.0, 1: 2.0}; expected one value"),
        ([1.0, float("nan")], "nan for call 'w1'"),
    ]
    for found, message in values:
        with pytest.raises((CreditError, RewardError), match=f"the reward rule 'wrong' returned {message}"):
            assign_credit(EPISODES, CreditRules(rewards=returning(found)))
    with pytest.raises(CreditError, match="returned no advantage for call 'w0'"):
        assign_credit(EPISODES, CreditRules(advantage=lambda groups: {}))
    ones = {t.call: 1.0 for e in EPISODES for t in e.transitions}
    with pytest.raises(CreditError, match="returned an advantage for 'other', which is not a call of the groups"):
        assign_credit(EPISODES, CreditRules(advantage=lambda groups: {**ones, "other": 1.0}))
    with pytest.raises(CreditError, match="returned nan for call"):
        assign_credit(EPISODES, CreditRules(advantage=lambda groups: {v.call: float("nan") for g in groups for v in g}))


OWN = """
from lightning_core.credit import advantage_rule, group_key, loss, reward_rule

@reward_rule("its-rewards", group=("task", "turn"))
def rewards(episode, *, gamma): return [gamma for _ in episode.transitions]

@advantage_rule("its-advantage", compares="batch")
def advantage(groups): return {v.call: v.value for group in groups for v in group}

@group_key("its-key")
def key(episode): return ["" for _ in episode.transitions]

@loss("its-loss", ratio=None)
def its_loss(logprobs_E, log_ratio_E, advantages_E): return -advantages_E * logprobs_E
"""
READ = """
import sys
from lightning_core import load_config
from lightning_core.config.build_rules import checked_loss, policy_rules
config = load_config(sys.argv[1])
for name, own in policy_rules(config).items():
    print(name, own.reward_rule.name, own.advantage_rule.name, *own.keys[:-1], own.keys[-1].__name__)
print(checked_loss(config.algorithm).name, config.algorithm.loss)
"""


def test_another_process_reads_the_rules_that_custom_code_declares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("its_rules.py").write_text(OWN, encoding="utf-8")
    importlib.import_module("its_rules")
    settings = config(
        credit={"rewards": "its-rewards", "gamma": 0.5, "advantage": "its-advantage", "group_by": ["turn", "its-key"]},
        policies={"p": {"agents": ["a"]}, "q": {"agents": ["b"], "credit": {"advantage": "rloo"}}},
        algorithm={"loss": "its-loss"},
    )
    folder, _ = open_run_folder(settings)
    command = [sys.executable, "-c", READ, str(folder / "config.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout.splitlines(), done.stderr) == (
        ["p its-rewards its-advantage turn key", "q its-rewards rloo turn key", "its-loss its_rules:its_loss"],
        "",
    )


def test_a_declared_rule_that_cannot_be_imported_leaves_no_folder(tmp_path: Path) -> None:
    @advantage_rule("local")
    def local(groups: list[list[Value]]) -> dict[str, float]:
        return {v.call: v.value for group in groups for v in group}

    settings = config(credit={"advantage": "local"}, run={"dir": str(tmp_path / "runs")})
    with pytest.raises(ConfigError, match=r"credit\.advantage: other processes cannot import 'local', .* top level of"):
        fit(lambda task: 0.0, config=settings, tasks=[{"id": "a"}])
    assert not (tmp_path / "runs").exists()


def test_a_declared_reward_rule_has_no_positional_arguments() -> None:
    with pytest.raises(CreditError, match=r"'positional' has the positional parameter 'gamma'; write '\*' before it"):
        reward_rule("positional")(own_rules.with_gamma)
    assert "positional" not in REWARD_RULES
    with pytest.raises(CreditError, match=r"parameter 'gamma'; .*'def rule\(episode, expected, \*, gamma\)'"):
        reward_rule("positional", needs=("critic",))(lambda episode, expected, gamma: [])


def test_a_component_may_list_its_keys() -> None:
    def listed(episode: Episode) -> list[Component]:
        return [Component(values=[episode.reward] * len(episode.transitions), group_by=["turn"])]

    assert assign_credit(EPISODES, CreditRules(rewards=listed)).metrics["groups"] == 2


def test_a_name_is_declared_once() -> None:
    with pytest.raises(CreditError, match=r"loss 'ppo' is already declared by lightning_core\.credit\.losses\.ppo"):
        loss("ppo")(lambda *tensors: tensors[0])
    again: Callable[..., Any] = ADVANTAGE_RULES["grpo"].function
    assert advantage_rule("grpo")(again) is again


def test_every_rule_is_documented() -> None:
    for registry in (REWARD_RULES, ADVANTAGE_RULES, LOSSES, MONITORS):
        for rule in registry.values():
            assert rule.description.endswith("."), rule.name


@pytest.mark.parametrize(("page", "tables"), [("credit-assignment.md", 3), ("algorithms.md", 1), ("monitors.md", 1)])
def test_the_pages_are_up_to_date(page: str, tables: int) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert text.count("<!-- generated: ") == text.count("<!-- end -->") == tables
    assert update(text) == text, f"run: python -m docs._generate.rules docs/{page}"
    assert len(TABLES) == 5


def test_a_rule_can_decide_about_flat_groups() -> None:
    """Three tasks: one attempt, two with equal rewards and numbers of calls that differ, two that differ."""
    found: list[list[float]] = []

    def minus_one(groups: list[list[Value]]) -> dict[str, float]:
        found.extend([v.value for v in group] for group in groups)
        return {v.call: -1.0 for group in groups for v in group}

    alone, equal = [episode("s", 1, task="s")], [episode("p", 1, "aa", task="p"), episode("q", 1, task="p")]
    episodes = [*alone, *equal, *EPISODES]
    advantage_rule("declared")(minus_one)
    before = assign_credit(episodes, CreditRules(advantage="declared")).advantages
    assert [call for call, advantage in before.items() if advantage == 0] == ["s0", "p0", "p1", "q0"]
    ADVANTAGE_RULES.forget("declared")
    advantage_rule("declared", flat_groups=True)(minus_one)
    discounted = CreditRules(rewards="discounted", gamma=0.5, group_by=["task"], advantage="declared")
    for order in (episodes, episodes[::-1]):
        found.clear()
        assert set(assign_credit(order, discounted).advantages.values()) == {-1}
        assert [0.875] * 3 in found, "the mean over rollouts of (0.5 + 1) / 2 and 1"


def test_a_flat_group_gets_exactly_0_from_a_declared_rule() -> None:
    """The mean of three times 0.1 is not 0.1 in floating point."""

    @advantage_rule("centred")
    def centred(groups: list[list[Value]]) -> dict[str, float]:
        return {v.call: v.value - sum(o.value for o in group) / len(group) for group in groups for v in group}

    attempts = [episode(name, 0.1) for name in "abc"]
    assert set(assign_credit(attempts, CreditRules(advantage="centred")).advantages.values()) == {0.0}
    attempts = [episode("a", 0.1), episode("b", 0.3)]
    found = assign_credit(attempts, CreditRules(advantage="centred")).advantages
    assert found == pytest.approx({"a0": -0.1, "b0": 0.1})


def grouped(groups: list[list[Value]]) -> list[float]:
    """Not a dictionary."""
    return [0.0]


def worded(groups: list[list[Value]]) -> dict[str, Any]:
    """Not numbers."""
    return {v.call: "high" for group in groups for v in group}


def nothing() -> None:
    """Takes no argument."""


@pytest.mark.parametrize(
    ("credit", "message"),
    [
        (
            {"rewards": f"{__name__}:nothing"},
            r"credit\.rewards: the function nothing\(\) .*one of the reward rules; expected",
        ),
        (
            {"rewards": "lightning_core.credit.advantage_rules:grpo"},
            "'grpo' of the advantage rules, expected one of the reward rules",
        ),
        ({"advantage": f"{__name__}:nothing"}, r"credit\.advantage: .*expected the signature \(groups, \*, …\)"),
        ({"group_by": [f"{__name__}:nothing"]}, r"credit\.group_by: .*one of the group keys"),
    ],
)
def test_a_function_of_another_kind_is_refused_by_its_key(credit: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rules(**credit)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (grouped, "returned list, expected a dictionary"),
        (worded, "returned 'high' for call .*expected a finite number"),
    ],
)
def test_a_wrong_result_of_an_advantage_rule_is_refused(rule: Any, message: str) -> None:
    with pytest.raises(CreditError, match=message):
        assign_credit(EPISODES, CreditRules(advantage=rule))
