"""Which agents of a program are trained, and that no wrong selection reaches a provider.

The programs call a real HTTP server in place of their provider. The policy is scripted.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import yaml
from rich.console import Console

from lightning_core import load_config, trainable
from lightning_core.capture import declare_agents, note_elsewhere, scope
from lightning_core.errors import ConfigError, InfrastructureError, TrainingError
from lightning_core.propagation import endpoint_environment
from lightning_core.records.ledger import Entry, routes
from lightning_core.records.store import Store
from lightning_core.rollouts.selection import check_agents, warn_of_unmatched
from lightning_core.testing.recording_server import recording_server
from lightning_core.tools.cli.tree import make_tree
from tests.program_runs import TASKS, Program, agents_of


def test_the_only_speaker_of_a_program_without_names_is_trained(program: Program) -> None:
    def solve(task: Any) -> float:
        assert program.ask() == "sampled"
        return 1.0

    assert agents_of(program.run(solve)) == {("agent", True)}
    assert [t.agent for e in program.episodes for t in e.transitions] == ["agent"] * 2
    assert program.provider.requests == []


def test_the_only_node_that_speaks_is_trained_under_its_name(program: Program) -> None:
    def solve(task: Any) -> float:
        with scope("load", kind="node"):
            pass
        with scope("write", kind="node"):
            program.ask()
        return 1.0

    assert agents_of(program.run(solve)) == {("write", True)}


def two_speakers(program: Program) -> Callable[[Any], float]:
    def solve(task: Any) -> float:
        for name in ("classifier", "reply"):
            with scope(name, kind="node"):
                program.ask(name)
        return 1.0

    return solve


def test_several_speakers_without_a_selection_stop_the_run(program: Program) -> None:
    with pytest.raises(ConfigError, match=r"has several: \['classifier', 'reply'\].*agents: \{train: \[classifier\]\}"):
        program.run(two_speakers(program))
    assert program.provider.requests == []
    assert {e.destination for e in program.ledger()} == {"policy (not trained)"}


def test_a_selected_agent_is_trained_and_the_other_goes_to_its_provider(program: Program) -> None:
    groups = program.run(two_speakers(program), agents={"train": ["classifier"]})
    assert agents_of(groups) == {("classifier", True), ("reply", False)}
    assert [r.body["messages"][0]["content"] for r in program.provider.requests] == ["reply"] * 2
    host = httpx.URL(program.provider.url).netloc.decode()
    assert routes(program.ledger()) == ["classifier → policy", f"reply → {host} (recorded, no key)"]


def test_all_agents_are_trained(program: Program) -> None:
    groups = program.run(two_speakers(program), agents={"train": "all", "frozen": {"reply": "base"}})
    assert agents_of(groups) == {("classifier", True), ("reply", False)}
    assert program.provider.requests == []


@pytest.mark.parametrize(("frozen", "warned"), [("*", True), ("judge*", False), ("writer", False)])
def test_a_wildcard_that_freezes_a_marked_agent_is_a_warning_if_calls_without_a_mark_are_trained(
    program: Program, caplog: pytest.LogCaptureFixture, frozen: str, warned: bool
) -> None:
    write = trainable("writer")(lambda: program.ask("write"))

    def solve(task: Any) -> float:
        write()
        program.ask("judge")
        return 1.0

    groups = program.run(solve, agents={"frozen": {frozen: "base"}})
    assert ("writer", frozen.startswith("judge")) in agents_of(groups)
    text = "agents.frozen: '*' matches the marked agents ['writer'], so they are not trained; the calls of ['agent']"
    assert caplog.text.count(text) == warned
    assert ("matches the marked agents" in caplog.text) == warned


def test_all_includes_calls_without_a_name(program: Program) -> None:
    def solve(task: Any) -> float:
        program.ask()
        return 1.0

    assert agents_of(program.run(solve, agents={"train": "all"})) == {("agent", True)}


CUSTOMER, CLERK = "You are a customer. Complain.", "You are a clerk. Help the customer."


def simulated_user(program: Program) -> Callable[[Any], float]:
    """A program of two roles without names."""

    def solve(task: Any) -> float:
        program.ask("Hi, how can I help?", system=CUSTOMER)
        program.ask("It is broken.", system=CLERK, tools=["refund"])
        return 1.0

    return solve


def test_roles_without_names_stop_the_run_and_the_rules_of_the_message_name_them(program: Program) -> None:
    with pytest.raises(ConfigError, match=r"2 roles in one rollout: 1\. .*You are a customer.*tools refund") as error:
        program.run(simulated_user(program))
    assert program.provider.requests == []
    agents = yaml.safe_load(str(error.value).partition("agents: ")[2].partition(". Give")[0])
    groups = program.run(simulated_user(program), agents=agents)
    assert agents_of(groups) == {("role-1", True), ("role-2", False)}
    assert [r.body["messages"][0]["content"] for r in program.provider.requests] == [CLERK] * 2
    same = [{**rule, "name": "shop"} for rule in agents["named"]]
    assert agents_of(program.run(simulated_user(program), agents={"named": same})) == {("shop", True)}


def test_counting_tokens_is_no_role(program: Program) -> None:
    def solve(task: Any) -> float:
        program.ask(system=CLERK)
        counted = httpx.post(f"{program.provider.url}/responses/input_tokens", json={"model": "gpt", "input": "hi"})
        return float(counted.raise_for_status().json()["input_tokens"])

    assert agents_of(program.run(solve)) == {("agent", True)}


def test_a_late_role_is_a_warning(program: Program, caplog: pytest.LogCaptureFixture) -> None:
    tasks: list[Any] = []

    def solve(task: Any) -> float:
        tasks.append(task)
        return float(bool(program.ask(system=CLERK) and (len(tasks) <= 16 or program.ask(system=CUSTOMER))))

    limits = {"retries": 0, "concurrency": 1}
    assert agents_of(program.run(solve, eval={"samples": 9}, rollouts=limits)) == {("agent", True)}
    assert caplog.text.count("all roles of the program 'agent' are trained as one agent: ") == 1


def test_rules_name_the_calls_that_have_no_name(program: Program, caplog: pytest.LogCaptureFixture) -> None:
    def solve(task: Any) -> float:
        simulated_user(program)(task)
        program.ask("Rate it.", model="gpt-4o-2026")
        with scope("writer", kind="node"):
            program.ask(system=CUSTOMER)
        return 1.0

    named = [
        {"name": "user", "contains": "You are a customer"},
        {"name": "judge", "model": "gpt-4o*", "tools": []},
        {"name": "clerk", "tools": ["ref*"]},
        {"name": "unused", "model": "o3"},
    ]
    agents = {"train": ["clerk", "writer"], "frozen": {"judge": "base"}, "named": named}
    groups = program.run(solve, agents=agents)
    assert agents_of(groups) == {("user", False), ("clerk", True), ("judge", False), ("writer", True)}
    assert [r.body["messages"][0]["content"] for r in program.provider.requests] == [CUSTOMER] * 2
    assert "agents.named: no call matched the rules of 'unused' in 2 rollouts" in caplog.text


def test_a_call_that_rules_of_two_names_match_stops_the_run(program: Program) -> None:
    named = [{"name": "user", "contains": "customer"}, {"name": "clerk", "tools": ["refund"]}]
    with pytest.raises(ConfigError, match=r"rules of \['user', 'clerk'\] match the same call \(.*You are a clerk"):
        program.run(simulated_user(program), agents={"train": ["clerk"], "named": named})
    assert {r.body["messages"][0]["content"] for r in program.provider.requests} <= {CUSTOMER}


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"name": "user"}, r"expected contains, model or tools, or the rule matches every call"),
        ({"name": "us*r", "contains": "x"}, r"expected the name of an agent, without \* and /"),
        ({"name": "reward function", "contains": "x"}, r"not 'reward function'"),
        ({"name": "user", "contains": ""}, r"at least 1 character"),
        ({"name": "other", "model": "gpt"}, r"agents.named\[1\]: matches the same calls as the rule of 'judge'"),
    ],
)
def test_rules_that_cannot_be_meant_are_errors(rule: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({"policy": {"model": "m"}, "agents": {"named": [{"name": "judge", "model": "gpt"}, rule]}})


def test_names_are_compared_without_the_newline_of_a_folded_text(program: Program) -> None:
    """CrewAI's YAML has ``role: >``."""

    def solve(task: Any) -> float:
        for name in ("Senior Researcher\n", "Reviewer: drafts\n"):
            with scope(name):
                program.ask()
        return 1.0

    for train in ("Senior Researcher", "Senior Researcher\n"):
        groups = program.run(solve, agents={"train": [train]})
        assert agents_of(groups) == {("Senior Researcher", True), ("Reviewer: drafts", False)}
    with pytest.raises(ConfigError, match="program has several") as error:
        program.run(solve)
    proposed = str(error.value).partition("agents: ")[2].partition(", mark")[0]
    assert yaml.safe_load(proposed) == {"train": ["Reviewer: drafts"]}


@pytest.mark.parametrize("declared", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_misspelt_name_never_reaches_a_provider(program: Program, declared: bool) -> None:
    solve = two_speakers(program)

    def declaring(task: Any) -> float:
        declare_agents(["classifier", "reply"] if declared else [])
        return solve(task)

    with pytest.raises(ConfigError, match=r"agents.train names 'clasifier', but .*'classifier', 'reply'.*Did you mean"):
        program.run(declaring, agents={"train": ["clasifier"]})
    assert program.provider.requests == []


def test_a_mark_that_appears_after_attempts_were_kept_stops_the_run(program: Program) -> None:
    """Which agents are trained would depend on the task."""

    def solve(task: Any) -> float:
        if task["id"] != TASKS[0]["id"]:
            trainable("late")(program.ask)()
        else:
            program.ask()
        return 1.0

    with pytest.raises(ConfigError, match=r"marked \['late'\] only after attempts in which \['agent'\].*agents.train"):
        program.run(solve, rollouts={"concurrency": 1, "group_size": 2, "retries": 0})


def test_a_misspelt_frozen_name_never_reaches_a_provider(program: Program) -> None:
    agents = {"train": ["classifier"], "frozen": {"repyl": "base"}}
    with pytest.raises(ConfigError, match=r"agents.frozen names 'repyl'.*Did you mean 'reply'"):
        program.run(two_speakers(program), agents=agents)
    assert program.provider.requests == []


@pytest.mark.parametrize(
    ("train", "frozen"),
    [
        pytest.param(["worker"], {}, marks=pytest.mark.long),
        pytest.param(["researcher*", "worker"], {}, marks=pytest.mark.long),
        (["worker", "writer-2", "rewriter"], {"judge": "base"}),
    ],
)
def test_a_name_that_nobody_had_yet_is_a_warning(
    program: Program, caplog: pytest.LogCaptureFixture, train: list[str], frozen: dict[str, str]
) -> None:
    """The scripted policy leads to no other agent; the supervisor's own model does."""

    def solve(task: Any) -> float:
        with scope("supervisor", kind="node"):
            route = program.ask()
        with scope("writer-1", kind="node"):
            program.ask()
        if route == "ok":
            with scope("worker", kind="node"):
                program.ask()
        return 1.0

    groups = program.run(solve, agents={"train": train, "frozen": frozen})
    assert agents_of(groups) == {("supervisor", False), ("writer-1", False), ("worker", True)}
    assert "the agents so far are ['supervisor', 'writer-1']" in caplog.text
    for name in {*train, *frozen} - {"worker"}:
        assert f"'{name}'" in caplog.text.rpartition("the agents so far")[2]


@pytest.mark.parametrize(
    "train", [["supervisor-1", "reseacher"], pytest.param(["team/reseacher"], marks=pytest.mark.long)]
)
def test_a_misspelt_name_stops_the_run_once_its_agent_spoke(program: Program, train: list[str]) -> None:
    def solve(task: Any) -> float:
        with scope("supervisor", kind="node"):
            route = program.ask()
        if route == "ok":
            with scope("team", kind="node"), scope("researcher", kind="node"):
                program.ask()
        return 1.0

    with pytest.raises(ConfigError, match=rf"agents.train names '{train[-1]}'.*Did you mean 'researcher'"):
        program.run(solve, agents={"train": train})


def test_other_agents_are_not_paid_for_long_if_no_trained_agent_is_reached(program: Program) -> None:
    """The run has 40 rollouts; 16 are answered by the providers of the others."""
    with pytest.raises(ConfigError, match=r"agents.train names 'critic'.*No trained agent made a call in 16 attempts"):
        program.run(
            two_speakers(program), agents={"train": ["critic"]}, rollouts={"concurrency": 1}, eval={"samples": 20}
        )
    assert len(program.provider.requests) == 32


def test_an_agent_that_speaks_after_others_is_found_without_a_provider(program: Program) -> None:
    """The attempt in which it was not known yet is repeated, and not recorded."""

    def solve(task: Any) -> float:
        for name in ("planner", "writer"):
            with scope(name, kind="node"):
                program.ask(name)
        return 1.0

    groups = program.run(solve, agents={"train": ["writer"]})
    assert agents_of(groups) == {("planner", False), ("writer", True)}
    assert len(program.provider.requests) == 2
    with Store(program.folder / "store.db", read_only=True) as store:
        assert store.count() == 2


def test_an_agent_that_exists_but_was_not_reached_is_a_warning(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    def solve(task: Any) -> float:
        declare_agents(["triage", "billing"])
        with scope("triage", kind="node"):
            program.ask()
        return 1.0

    with caplog.at_level(logging.WARNING):
        program.run(solve, agents={"train": ["triage", "billing"]})
    assert "the trained agent 'billing' was not reached in 2 rollouts" in caplog.text


def test_marks_made_inside_solve_are_trained_from_the_first_call_on(program: Program) -> None:
    def solve(task: Any) -> float:
        with scope("intro", kind="node"):
            program.ask("intro")
        trainable(lambda: program.ask("writer"), name="writer")()
        return 1.0

    assert agents_of(program.run(solve)) == {("intro", False), ("writer", True)}
    assert {r.body["messages"][0]["content"] for r in program.provider.requests} == {"intro"}


def test_the_mark_of_solve_names_what_has_no_other_name(program: Program) -> None:
    """A client that knows only the URL and the key of the rollout."""

    @trainable("coder")
    def solve(task: Any) -> float:
        environment = endpoint_environment()
        key = environment["OPENAI_API_KEY"].partition(".")[0]
        with httpx.Client() as client:
            body = {"model": "gpt", "messages": [{"role": "user", "content": "hi"}]}
            url = f"{environment['OPENAI_BASE_URL']}/chat/completions"
            client.post(url, json=body, headers={"authorization": f"Bearer {key}"}).raise_for_status()
        return 1.0

    assert agents_of(program.run(solve)) == {("coder", True)}


def test_the_calls_of_a_reward_function_go_to_their_provider(program: Program) -> None:
    def solve(task: Any) -> str:
        return program.ask("agent")

    def grade(task: Any, result: Any) -> float:
        return float(program.ask("grade") == "ok")

    groups = program.run(solve, reward=grade)
    assert agents_of(groups) == {("agent", True), ("reward function", False)}
    assert {r.reward for g in groups for r in g.rollouts} == {1.0}


def test_auxiliary_calls_are_answered_but_not_trained(program: Program) -> None:
    def solve(task: Any) -> float:
        with scope("coder", kind="node"):
            assert program.ask("Fix it") == program.ask("Write a title for: Fix it") == "sampled"
            program.ask("Fix it", model="claude-haiku-4")
        return 1.0

    rules = [{"name": "title", "contains": "Write a title"}, {"name": "small", "agent": "coder", "model": "*-haiku-*"}]
    groups = program.run(solve, agents={"train": ["coder"], "auxiliary": rules})
    assert agents_of(groups) == {("coder", True), ("coder/title", False), ("coder/small", False)}
    assert [t.agent for e in program.episodes for t in e.transitions] == ["coder"] * 2
    assert {"coder/title → policy (not trained)", "coder/small → policy (not trained)"} < set(routes(program.ledger()))


def test_a_rule_for_auxiliary_calls_must_match_something() -> None:
    with pytest.raises(ConfigError, match=r"agents.auxiliary.*expected agent, model or contains"):
        load_config({"policy": {"model": "m"}, "agents": {"auxiliary": [{"name": "all"}]}})


def test_a_trained_agent_that_goes_elsewhere_stops_the_run_with_the_host(program: Program) -> None:
    """The host is ignored, so nothing that the agent says reaches the endpoint."""
    host = httpx.URL(program.provider.url).netloc.decode()

    def solve(task: Any) -> float:
        with scope("writer", kind="node"):
            program.ask()
        return 1.0

    with pytest.raises(TrainingError, match=rf"no trained agent made a call in 2 rollouts.*{host}.*ignore_hosts"):
        program.run(solve, agents={"train": ["writer"]}, rollouts={"ignore_hosts": [host]})
    assert {(e.kind, e.agent, e.where) for e in program.ledger()} == {("elsewhere", "writer", host)}


def test_one_of_two_trained_agents_that_goes_elsewhere_stops_the_run(program: Program) -> None:
    with recording_server() as other:
        host = httpx.URL(other.url).netloc.decode()
        bypassing = Program(other, program.folder)

        def solve(task: Any) -> float:
            with scope("writer", kind="node"):
                program.ask()
            with scope("editor", kind="node"):
                bypassing.ask()
            return 1.0

        sections = {"agents": {"train": ["writer", "editor"]}, "rollouts": {"ignore_hosts": [host]}}
        with pytest.raises(ConfigError, match=rf"no call of the trained agent 'editor' came through .*{host}"):
            program.run(solve, **sections)


def test_the_hosts_with_the_most_requests_are_named_first(program: Program) -> None:
    def solve(task: Any) -> float:
        with scope("writer"):
            for number in range(8):
                for _ in range(number + 1):
                    note_elsewhere(f"host-{number}", "ignored")
        return 1.0

    named = ", ".join(rf"host-{number} \(ignored\)" for number in (7, 6, 5, 4, 3))
    with pytest.raises(TrainingError, match=rf"Requests went to {named}\. Remove .*, or give"):
        program.run(solve, agents={"train": ["writer"]})


def test_rollouts_without_calls_are_counted(program: Program, caplog: pytest.LogCaptureFixture) -> None:
    def solve(task: Any) -> float:
        if task["id"] == "a":
            program.ask()
        return 1.0

    program.run(solve)
    assert [e.task_id for e in program.episodes if e.transitions] == ["a"]


def test_a_program_that_makes_no_call_is_told_so(program: Program) -> None:
    with pytest.raises(
        TrainingError, match=r"no trained agent made a call in 2 rollouts.*uses a cache, a process that"
    ):
        program.run(lambda task: 1.0)


def test_rollouts_that_are_left_out_name_their_statuses_and_the_remedy(program: Program) -> None:
    def solve(task: Any) -> float:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "functions": [{"name": "f"}]}
        httpx.post(f"{program.provider.url}/chat/completions", json=body).raise_for_status()
        return 1.0

    expected = r"all 2 rollouts were left out \(2 refused\); the first: .*functions.*\. Correct the part of the request"
    with pytest.raises(InfrastructureError, match=expected):
        program.run(solve)


def test_a_provider_that_fails_is_not_blamed_on_the_agent(program: Program) -> None:
    program.provider.fail_next = 100

    def solve(task: Any) -> float:
        with scope("agent", kind="node"):
            program.ask()
        return 1.0

    with pytest.raises(InfrastructureError, match="all 2 rollouts had an infrastructure failure"):
        program.run(solve, agents={"train": ["other"], "frozen": {"agent": "gpt"}})


def test_no_trained_agent_was_reached(program: Program) -> None:
    def solve(task: Any) -> float:
        declare_agents(["triage", "refund"])
        with scope("triage", kind="node"):
            program.ask()
        return 1.0

    with pytest.raises(
        TrainingError, match=r"no trained agent was reached in 2 rollouts: \['refund'\]. Calls came from \['triage'\]"
    ):
        program.run(solve, agents={"train": ["refund"]})


def test_a_mark_that_the_tasks_do_not_use_is_named_with_what_to_do(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    @trainable("summarizer")
    def summarize(text: str) -> str:
        return program.ask(text)

    def solve(task: Any) -> float:
        program.ask()
        return 1.0

    selected = r"\['summarizer'\], selected by their marks because agents.train is not set\. Calls came from \['\(no agent\)'\]"
    advice = (
        r"Mark the function that makes the calls without an agent with @trainable, set agents.train: all, or add tasks"
    )
    with pytest.raises(TrainingError, match=rf"reached in 2 rollouts: {selected}\. {advice}"):
        program.run(solve)
    assert "attempts. The marks" not in caplog.text
    with pytest.raises(TrainingError, match="no trained agent was reached in 1 rollout:"):
        program.run(solve, eval={"samples": 1}, tasks_run=TASKS[:1])
    caplog.clear()
    with pytest.raises(TrainingError, match="no trained agent was reached"):
        program.run(solve, eval={"samples": 10})
    warning = "made a call in 16 attempts. The marks ['summarizer'] select the agents to train"
    assert caplog.text.count(warning) == 1
    assert summarize.__name__ == "summarize"


def test_a_marked_agent_that_later_tasks_reach_is_trained(program: Program, caplog: pytest.LogCaptureFixture) -> None:
    @trainable("rare")
    def rare() -> str:
        return program.ask()

    def solve(task: Any) -> float:
        program.ask()
        if task["id"] == "19":
            rare()
        return 1.0

    sections = {"rollouts": {"retries": 0, "group_size": 2, "concurrency": 1}}
    program.run(solve, tasks_run=[{"id": str(number)} for number in range(20)], **sections)
    assert caplog.text.count("no trained agent made a call in 16 attempts") == 1
    assert [e.task_id for e in program.episodes if e.transitions] == ["19"]


def test_a_misspelt_agent_of_a_rule_for_auxiliary_calls_is_an_error(program: Program) -> None:
    rules = [{"name": "title", "contains": "title", "agent": "clasifier"}]
    with pytest.raises(ConfigError, match=r"agents.auxiliary names 'clasifier'.*Did you mean 'classifier'"):
        program.run(two_speakers(program), agents={"train": ["classifier"], "auxiliary": rules})


def test_a_stray_call_is_blamed_on_every_rollout_that_it_may_belong_to(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent hands its prompt to an older thread in a way that cannot be seen, and makes do without an answer."""
    requests: list[tuple[threading.Event, list[str]]] = []
    wake = threading.Event()

    def serve() -> None:
        while wake.wait():
            wake.clear()
            while requests:
                done, answers = requests.pop()
                try:
                    answers.append(program.ask("stray"))
                except Exception:  # noqa: BLE001 - as careless programs do
                    answers.append("fallback")
                done.set()

    threading.Thread(target=serve, daemon=True).start()

    def solve(task: Any) -> float:
        program.ask("own")
        done, answers = threading.Event(), list[str]()
        requests.append((done, answers))
        wake.set()
        done.wait(30)
        return float(answers == ["sampled"])

    with pytest.raises(InfrastructureError, match=r"was refused: thread .* made it outside any rollout"):
        program.run(solve)
    assert program.provider.requests == []
    host = httpx.URL(program.provider.url).netloc.decode()
    reason = "outside any rollout, while rollouts run in this process"
    assert Entry(kind="refused", agent=None, where=host, detail=reason) in program.ledger()
    assert caplog.text.count("was refused: thread") == 1


@pytest.mark.parametrize(
    "body",
    [pytest.param({"prompt": "hi"}, marks=pytest.mark.long), {"messages": [{"role": "user", "content": "hi"}]}],
)
@pytest.mark.parametrize("others", [0, 1])
def test_a_trained_agent_whose_requests_name_no_model_is_reported(
    program: Program, caplog: pytest.LogCaptureFixture, body: Any, others: int
) -> None:
    def solve(task: Any) -> float:
        with scope("writer"):
            httpx.post(f"{program.provider.url}/generate", json=body)
            for _ in range(others):
                program.ask()
        return 1.0

    if others:
        program.run(solve, agents={"train": ["writer"]})
        assert caplog.text.count("the trained agent 'writer' sends requests to 127.0.0.1:") == 1
    else:
        with pytest.raises(TrainingError, match=r"\(names no model\)\. Name a model in the request's body"):
            program.run(solve, agents={"train": ["writer"]})
    assert {e.detail for e in program.ledger() if e.kind == "elsewhere"} == {"names no model"}


def test_an_ignored_host_that_no_request_went_to_is_a_warning(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    host = httpx.URL(program.provider.url).netloc.decode()
    wrong = host.replace("127", "128")
    config = load_config({"policy": {"model": "m"}, "rollouts": {"ignore_hosts": [wrong, "127.0.0.1"]}})

    def solve(task: Any) -> float:
        program.ask()
        return 1.0

    def monitor(task: Any) -> float:
        thread = threading.Thread(target=contextvars.Context().run, args=(program.ask,))
        thread.start()
        thread.join()
        return 1.0

    program.run(solve, agents={"train": "all"})
    warn_of_unmatched(config, program.ledger())
    assert f"lists '{wrong}', but no request went there" in caplog.text
    assert "lists '127.0.0.1'" in caplog.text

    caplog.clear()
    with pytest.raises(TrainingError, match="no trained agent made a call"):
        program.run(monitor, agents={"train": "all"}, rollouts={"ignore_hosts": ["127.0.0.1"]})
    warn_of_unmatched(config, program.ledger())
    assert f"lists '{wrong}', but no request went there; did you mean '{host}'?" in caplog.text
    assert "lists '127.0.0.1'" not in caplog.text


CALL = '{"name": "add", "arguments": {"x": 1}}'


@pytest.mark.parametrize(
    ("answer", "tools", "warned"),
    [
        (CALL, ["add"], True),
        (CALL, [], False),
        ("It is 2.", ["add"], False),
        (f"<tool_call>{CALL}</tool_call>", ["add"], False),
    ],
)
def test_most_calls_of_tools_as_text_are_a_warning(
    program: Program, caplog: pytest.LogCaptureFixture, answer: str, tools: list[str], warned: bool
) -> None:
    def solve(task: Any) -> float:
        program.ask(tools=tools)
        return 0.0

    groups = program.run(solve, answer=answer)
    check_agents(load_config({"policy": {"model": "m"}}), [r for g in groups for r in g.rollouts])
    assert (
        "2 of 2 responses of the agent 'agent' to requests with tools have a tool call as text" in caplog.text
    ) is warned
    assert ("tool_choice 'required'" in caplog.text) is warned
    console = Console(width=200)
    with console.capture() as shown:
        console.print(make_tree(groups[0].rollouts[0].trace))
    assert ("a tool call as text, which the agent receives as text" in shown.get()) is warned
