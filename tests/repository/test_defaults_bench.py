"""The suites of the bench of defaults: their tasks and rewards, and the arithmetic of its report."""

from __future__ import annotations

import inspect
import math
import platform
import re
import sys
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_core.backends.backend import Delta, SamplingParams
from lightning_core.backends.scripted import EveryModel, ScriptedBackend
from lightning_core.chat.chat import Chat
from lightning_core.config.rule_names import function_of
from lightning_core.credit import CreditRules, assign_credit
from lightning_core.testing import Playground, open_playground
from lightning_core.testing.programs import run_async
from tests.bench.cpu import cpu
from tests.bench.defaults import __main__ as bench
from tests.bench.defaults import report
from tests.bench.defaults.basis import basis
from tests.bench.defaults.queue import Run, left, steps_of, wanted
from tests.bench.defaults.results import Row, append, read
from tests.bench.defaults.statistics import by_agent, over_agents, paired, reward, solved
from tests.bench.defaults.suite.agent import HELD_OUT, Agent, constant_reward, split
from tests.bench.defaults.suites import SUITES, agents_of
from tests.bench.defaults.variant import BASELINE, MOST_STEPS, Variant, configure, parse_variant
from tests.credit.episodes import episode

AGENTS = {(suite, name): agent for suite in SUITES for name, agent in agents_of(suite).items()}
CPU = "a CPU"
NONSENSE = ("nonsense",) * 20
ALL = pytest.mark.parametrize("agent", AGENTS.values(), ids=[name for _, name in AGENTS])


class Script(ScriptedBackend):
    """Gives the next of ``responses``, of any length: its tokens are bytes, and the limits of the agents count others."""

    def __init__(self) -> None:
        self.responses: Iterator[str] = iter(())
        super().__init__(lambda _: next(self.responses), models=EveryModel())

    def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, model: str, stream: bool = False
    ) -> AsyncGenerator[Delta]:
        return super().generate(prompt_ids, replace(params, max_tokens=1000), model=model, stream=stream)


@pytest.fixture(scope="module")
def opened() -> Iterator[tuple[Playground, Script]]:
    script = Script()
    with open_playground(script, chats=Chat(script.tokenizer)) as playground:
        yield playground, script


def reward_of(opened: tuple[Playground, Script], agent: Agent, task: dict[str, Any], responses: Sequence[str]) -> float:
    """The reward of a rollout in which the model gives ``responses``."""
    playground, script = opened
    script.responses = iter(responses)
    with playground.rollout(task, train=(*agent.train, *agent.frozen)):
        answer = agent.solve(task)
        if inspect.isawaitable(answer):
            answer = run_async(answer)
    assert responses is NONSENSE or list(script.responses) == []
    return agent.score(task, answer)


def test_the_suites_have_other_agents() -> None:
    names = [name for _, name in AGENTS]
    assert len(names) == len(set(names))
    assert len(agents_of("first")) >= 16
    assert len(agents_of("second")) == 8


@ALL
def test_training_and_held_out_tasks_have_no_text_in_common(agent: Agent) -> None:
    tasks, held_out = split(agent)
    assert len(held_out) == HELD_OUT
    assert len(tasks) >= 60
    assert not {task["text"] for task in tasks} & {task["text"] for task in held_out}
    assert len({task["id"] for task in tasks + held_out}) == len(tasks + held_out)
    if agent.fact is not None:
        assert not set(map(agent.fact, tasks)) & set(map(agent.fact, held_out))
    assert split(agent) == (tasks, held_out)


@ALL
def test_the_ideal_responses_get_the_full_reward_and_nonsense_gets_0(
    opened: tuple[Playground, Script], agent: Agent
) -> None:
    tasks, _ = split(agent)
    for task in tasks[:2]:
        assert reward_of(opened, agent, task, agent.ideal(task)) == pytest.approx(agent.solved)
    assert reward_of(opened, agent, tasks[0], NONSENSE) == 0


@ALL
def test_one_answer_to_all_tasks_does_not_solve_them(agent: Agent) -> None:
    constant = constant_reward(agent)
    assert (constant is None) != agent.is_answer
    assert constant is None or constant < 0.7


FAST = Variant(name="fast", changes=("trainer.learning_rate=5e-5", "policy.train_layers=15"))


def row(agent: str = "route", seed: int = 0, *, variant: Variant = BASELINE, gain: float = 0.0, steps: int = 10) -> Row:
    """A run whose four held-out rewards are 0, 0.5, 1 and ``gain``."""
    return Row(
        suite="first",
        agent=agent,
        variant=variant.name,
        changes=list(variant.changes),
        seed=seed,
        minutes=3.0,
        commit="c",
        cpu=CPU,
        threads=2,
        basis=basis(agents_of("first")[agent]) if agent in agents_of("first") else "",
        steps=steps,
        seconds=360.0,
        wall_seconds=200.0,
        before=[0.0, 0.0, 1.0, 0.0],
        after=[0.0, 0.5, 1.0, gain],
        solved_from=1.0,
        groups_equal=0.5,
        distinct_before=4,
        distinct_after=2,
        constant=0.25,
    )


def table(gains: dict[str, Sequence[float]]) -> tuple[list[Row], list[Row]]:
    """Runs with the defaults and with `FAST`, which gains ``gains`` in the fourth task, one for each seed, by agent."""
    pairs = [(agent, seed, gain) for agent, values in gains.items() for seed, gain in enumerate(values)]
    return [row(a, s) for a, s, _ in pairs], [row(a, s, variant=FAST, gain=g) for a, s, g in pairs]


def test_a_solved_task_has_the_full_reward_up_to_the_rounding_of_the_file() -> None:
    assert row(gain=0.9996).solved_after == 0.5
    assert row(gain=0.999).solved_after == 0.25
    assert row().solved_before == 0.25


def test_differences_are_paired_by_agent_seed_and_budget() -> None:
    baseline, changed = table({"a": [1.0, 0.0], "b": [0.4]})
    assert paired(baseline[:1] + baseline[2:], changed, solved) == {"a": [0.25], "b": [0.0]}
    found = paired(baseline, changed, reward)
    assert found == {"a": pytest.approx([0.25, 0.0]), "b": pytest.approx([0.1])}
    assert over_agents(found).mean == pytest.approx((0.125 + 0.1) / 2)  # every agent counts once
    for other in ({"minutes": 6.0}, {"basis": "of other defaults"}, {"cpu": "another CPU"}, {"threads": 1}):
        assert paired([replace(r, **other) for r in baseline], changed, reward) == {}


def test_a_seed_that_was_repeated_on_another_cpu_counts_once() -> None:
    baseline, changed = table({"a": [1.0, 0.0]})
    repeated = [[replace(r, cpu="another CPU") for r in rows if r.seed == 0] for rows in (baseline, changed)]
    repeated[1] = [replace(r, after=[0.0, 0.5, 1.0, 0.5]) for r in repeated[1]]
    own, others = [*baseline, *repeated[0]], [*changed, *repeated[1]]
    assert paired(own, others, reward) == {"a": pytest.approx([(0.25 + 0.125) / 2, 0.0])}
    (found,) = by_agent(own, others)
    assert (found.seeds, found.mean) == (2, pytest.approx((0.25 + 0.125) / 4))


def test_the_interval_is_over_agents() -> None:
    estimate = over_agents({str(n): [0.1 * (n % 2)] * 3 for n in range(16)})
    # Student's t of 16 agents with a standard deviation of 0.052.
    assert (estimate.mean, estimate.low, estimate.high) == pytest.approx((0.05, 0.0225, 0.0775), abs=0.004)
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(100):
        agents = rng.normal(0.05, 0.1, size=12)
        found = over_agents({str(n): rng.normal(mean, 0.1, size=3) for n, mean in enumerate(agents)})
        held += found.low <= 0.05 <= found.high
    assert 88 <= held <= 99, "95% intervals of agents that differ, with seeds that differ as much"
    assert math.isnan(over_agents({"a": [0.1]}).low)


def test_agents_that_got_worse_are_reported() -> None:
    worse = [replace(r, after=[0.0] * 8) for r in table({"a": [0, 0, 0], "b": [0, 0, 0]})[1]]
    baseline = [replace(r, after=[1.0] * 8) for r in table({"a": [0, 0, 0]})[0]]
    baseline += [replace(r, after=[0.0] * 8) for r in table({"b": [0, 0, 0]})[0]]
    assert [(d.agent, d.mean, d.is_worse) for d in by_agent(baseline, worse)] == [("a", -1.0, True), ("b", 0.0, False)]


def test_a_task_that_was_left_out_counts_in_no_mean() -> None:
    (baseline,), (changed,) = table({"a": [1.0]})
    baseline = replace(baseline, after=[None, 0.5, 1.0, 0.0])
    assert (baseline.reward_after, baseline.solved_after) == pytest.approx((0.5, 1 / 3))
    (found,) = by_agent([baseline], [changed])
    assert found.mean == pytest.approx(1 / 3)


def test_the_report_has_all_agents_and_compares_variants() -> None:
    baseline, changed = table({str(n): [1.0, 1.0] for n in range(6)})
    text = "\n".join(report.lines([*baseline, *changed]))
    assert f"The first suite, 3 minutes of two cores, {CPU}, 2 threads, 24 runs" in text
    assert "fast: trainer.learning_rate=5e-5 policy.train_layers=15" in text
    assert "solved share +0.250 [+0.250, +0.250]" in text
    assert "worse by more than their interval: not known; 6 agents have too few seeds for an interval (3)" in text
    assert text.count("mean ") == 2
    assert "equal time" not in text
    assert "two commits" not in text
    later = "\n".join(report.lines([*baseline, *(replace(r, commit="d") if r.seed else r for r in changed)]))
    assert "12 paired runs of 6 agents\n  6 of them ran at two commits, whose speed may differ\n" in later
    assert "settled" not in later
    some = "\n".join(report.lines([*(replace(r, groups_equal=0.8 - 0.1 * r.seed) for r in baseline), *changed]))
    assert "solved share where defaults settled, 6 pairs: +0.250 [+0.250, +0.250]" in some
    short = report.lines([*baseline, *(replace(r, seconds=90.0) for r in changed)])
    assert "not at equal time: 0 25%, " in "\n".join(short)


def test_the_report_names_agents_that_are_worse() -> None:
    baseline, changed = table({"a": [1.0] * 3, "b": [1.0] * 3, "c": [1.0]})
    solved_all = [replace(r, after=[1.0] * 8) if r.agent == "a" else r for r in baseline]
    worse = [replace(r, after=[0.0] * 8) if r.agent == "a" else r for r in changed]
    text = "\n".join(report.lines([*solved_all, *worse]))
    assert "worse by more than their interval: a -1.00 [" in text
    assert "]; 1 agent has too few seeds for an interval (3)" in text
    same = "\n".join(report.lines([*baseline[:6], *changed[:6]]))
    assert same.splitlines()[-1].endswith("worse by more than their interval: no agent")


def test_the_report_averages_no_rows_of_other_cpus_or_other_defaults() -> None:
    """The rows of the other CPU have no run with the defaults."""
    here, changed = table({str(n): [1.0] for n in range(6)})
    elsewhere = [replace(r, cpu="another CPU", after=[0.0] * 4) for r in changed]
    other = replace(changed[0], variant="other", changes=["trainer.learning_rate=1e-4"], cpu="another CPU")
    earlier = replace(here[0], basis="of earlier defaults", after=[0.0] * 4)
    rows = [earlier, *here, *changed, *elsewhere, other]
    text = "\n".join(report.lines(rows))
    assert f"{CPU}, 2 threads, 13 runs" in text
    assert "another CPU, 2 threads, 7 runs" in text
    assert "defaults, basis of earlier defaults\n" in text
    assert "fast against defaults, 6 paired runs of 6 agents" in text
    assert "fast: no run has the agent, seed and basis of a run with defaults" in text
    assert "other against fast, 1 paired run of 1 agent\n" in "\n".join(report.lines(rows, "fast"))


def test_the_report_compares_over_all_cpus_what_is_paired_on_each() -> None:
    baseline, changed = table({str(n): [1.0] for n in range(6)})
    elsewhere = [replace(r, cpu="another CPU", seed=1) for r in [*baseline, *changed]]
    elsewhere = [replace(r, after=[0.0] * 4) if r.variant == "fast" else r for r in elsewhere]
    text = "\n".join(report.lines([*baseline, *changed, *elsewhere]))
    *_, over_all = text.split("The first suite")
    assert f"2 threads, pairs of {' and '.join(sorted([CPU, 'another CPU']))}" in over_all
    assert "fast against defaults, 12 paired runs of 6 agents" in over_all
    assert "solved share +0.000 [" in over_all
    assert "pairs of" not in "\n".join(report.lines([*baseline, *changed, *elsewhere[:6]]))


def bench_rule(name: str) -> CreditRules:
    """Imported in a test: the module declares a rule."""
    return CreditRules(advantage=function_of(f"tests.bench.defaults.failed_groups:{name}", key="credit.advantage"))


def test_of_some_failed_groups_as_many_count_as_groups_that_differ() -> None:
    rules = bench_rule("grpo_some_failed")
    rewards = {"a": (0, 0), "b": (0, 0), "c": (1, 0), "d": (1, 1)}
    episodes = [
        episode(f"{task}{n}", earned, task=task) for task, pair in rewards.items() for n, earned in enumerate(pair)
    ]
    found = assign_credit(episodes, rules).advantages
    assert [task for task in rewards if found[f"{task}00"]] == ["a", "c"]
    assert found == {
        call: 0.0 if call[0] == "b" else a
        for call, a in assign_credit(episodes, bench_rule("grpo_failed")).advantages.items()
    }
    settled = [e for e in episodes if e.trace.task_id != "c"]
    assert [task for task in "abd" if assign_credit(settled, rules).advantages[f"{task}00"]] == ["a"]


def test_an_imagined_success_belongs_to_each_group() -> None:
    rules = bench_rule("ngrpo")
    rewards = {"a": (0, 0, 0), "b": (1, 0, 0), "c": (1, 1, 1), "d": (2, 2, 2)}
    episodes = [
        episode(f"{task}{n}", earned, task=task) for task, group in rewards.items() for n, earned in enumerate(group)
    ]
    found = assign_credit(episodes, rules)
    assert list(found.advantages.values()) == pytest.approx([*[-0.5] * 3, 0.8660, -0.8660, -0.8660, *[0] * 6], abs=1e-4)


def test_the_report_names_classes_that_are_never_solved() -> None:
    _, held_out = split(agents_of("first")["handoff"])
    own = replace(row("handoff"), after=[float(task["desk"] == "repairs") for task in held_out])
    text = "\n".join(report.lines([own]))
    assert "classes that no run solves: handoff: billing" in text
    solved_once = replace(own, seed=1, after=[1.0] * len(held_out))
    assert "classes that no run solves" not in "\n".join(report.lines([own, solved_once]))


def test_a_run_whose_evaluation_was_left_out_is_named_and_counts_in_no_mean() -> None:
    text = "\n".join(report.lines([row("query", gain=1.0), replace(row("query", 1), after=[None] * 4)]))
    assert "without query, seed 1, defaults: all rollouts of an evaluation were left out" in text
    assert ", 1 run\n" in text
    assert "nan" not in text


def test_the_report_keeps_variants_of_one_name_and_other_changes_apart() -> None:
    other = replace(row(variant=FAST), changes=["trainer.learning_rate=1e-4"])
    assert [len(rows) for rows in report.variants([row(), row(variant=FAST), other]).values()] == [1, 1, 1]


def test_the_name_of_a_cpu_has_its_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs on machines of one name and different speed are not compared."""
    backend = pytest.importorskip("torch").backends.cpu
    names: list[str] = []
    for sets in ("AVX2", "AVX512"):
        monkeypatch.setattr(backend, "get_cpu_capability", lambda sets=sets: sets)
        names.append(cpu())
    assert [sets in name for sets, name in zip(("AVX2", "AVX512"), names, strict=True)] == [True, True]
    assert names[0] != names[1]


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="reads the numbers that Linux has on x86"
)
def test_the_name_of_a_cpu_has_its_family_and_model() -> None:
    """Generations of a CPU that virtual machines give one name are not compared."""
    pytest.importorskip("torch")
    text = Path("/proc/cpuinfo").read_text()
    family, model = (re.findall(rf"^{key}\s*: (\d+)$", text, re.MULTILINE)[0] for key in ("cpu family", "model"))
    assert f"(family {family}, model {model})" in cpu()


def test_the_queue_continues_after_the_recorded_runs(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "results.jsonl"
    runs = list(wanted("first", ["route", "query"], [BASELINE, FAST], seeds=2, minutes=3.0, threads=2, cpu=CPU))
    assert [(run.agent, run.variant.name, run.seed) for run in runs[:3]] == [
        ("route", "defaults", 0),
        ("route", "fast", 0),
        ("query", "defaults", 0),
    ]
    append(path, row("route"))
    with path.open("a") as file:
        file.write('{"suite": "fir')  # an interrupted write
    append(path, row("route", variant=FAST))
    assert left(runs, read(path)) == runs[2:]
    assert left(runs, [replace(r, minutes=6.0) for r in read(path)]) == runs


def test_a_schedule_ends_with_the_budget() -> None:
    rows = [row(steps=8), row(seed=1, steps=11), row(variant=FAST, steps=30), row("query", steps=50)]
    scheduled = Variant(name="linear", changes=("trainer.schedule=linear",))
    (run,) = wanted("first", ["route"], [scheduled], seeds=1, minutes=3.0, threads=2, cpu=CPU)
    assert steps_of(run, rows) == 10
    assert steps_of(replace(run, variant=FAST), rows) == MOST_STEPS
    with pytest.raises(ValueError, match="found no row of route with the defaults in 3 minutes"):
        steps_of(run, rows[2:])


def test_runs_with_a_schedule_come_last_and_need_a_row_of_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order, known = tmp_path / "order", tmp_path / "rows.jsonl"
    append(known, row(seed=1))

    def note(run: Run, *_: object) -> list[str]:
        return [sys.executable, "-c", f"print({run.variant.name!r}, file=open({str(order)!r}, 'a'))"]

    monkeypatch.setattr(bench, "_command", note)
    scheduled = Variant(name="linear", changes=("trainer.schedule=linear",))
    runs = list(wanted("first", ["route"], [scheduled, BASELINE], seeds=1, minutes=3.0, threads=2, cpu=CPU))
    assert bench.run_all(runs, known, jobs=2) == 0
    assert order.read_text().split() == ["defaults", "linear"]
    assert bench.run_all(runs[:1], tmp_path / "none.jsonl", jobs=1) == 1
    assert "FAILED\nfound no row of route" in capsys.readouterr().out
    assert order.read_text().split() == ["defaults", "linear"]


def test_a_run_has_the_shipped_defaults_and_the_changes() -> None:
    assert parse_variant("fast: trainer.learning_rate=5e-5 policy.train_layers=15") == FAST
    agent = agents_of("first")["pick"]
    config = configure(agent, FAST.changes, seed=1, steps=7, folder="runs")
    given = {"agents", "policy", "trainer", "eval", "run"}
    assert config.model_fields_set == given
    assert (config.trainer.learning_rate, config.policy.train_layers) == (5e-5, 15)
    plain = configure(agent, (), seed=1, steps=7, folder="runs")
    assert plain.trainer.model_fields_set == {"steps"}
    assert plain.policy.model_fields_set == {"model"}
    assert plain.agents.frozen == {"reader": "base"}


@pytest.mark.parametrize("text", ["fast", "fast:", ": a.b=1", "fast: a.b", "defaults: a.b=1"])
def test_a_variant_has_a_name_and_changes(text: str) -> None:
    with pytest.raises(ValueError, match=r"found|taken"):
        parse_variant(text)
