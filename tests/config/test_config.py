"""The configuration: valid values, and the errors of invalid ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs._generate.configuration import reference
from lightning_core import Config, load_config
from lightning_core.config import dump_config
from lightning_core.config.resolve import agents_policies, policy_settings
from lightning_core.config.sections import Policy
from lightning_core.credit import ADVANTAGE_RULES
from lightning_core.errors import ConfigError

MINIMAL = "policy: {model: some/model}\n"


def load_text(folder: Path, text: str, *overrides: str, needs: tuple[str, ...] = ()) -> Config:
    path = folder / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides, needs=needs)


def refusal(folder: Path, text: str, *overrides: str, needs: tuple[str, ...] = ()) -> list[str]:
    """The listed problems, without the file's folder."""
    with pytest.raises(ConfigError) as caught:
        load_text(folder, text, *overrides, needs=needs)
    head, *lines = str(caught.value).replace(f"{folder}/", "").splitlines()
    assert head.startswith(f"{len(lines)} problem")
    return [line.strip() for line in lines]


def test_defaults(tmp_path: Path) -> None:
    config = load_text(tmp_path, MINIMAL)
    assert config.policy.model == "some/model"
    assert (config.rollouts.group_size, config.algorithm.clip_high, config.trainer.name) == (8, 0.28, "torch")
    assert config.policy.lora is None
    assert config == load_config({"policy": {"model": "some/model"}}) == Config(policy=Policy(model="some/model"))


def test_short_and_long_task_sources(tmp_path: Path) -> None:
    text = MINIMAL + "tasks: {train: a.jsonl, eval: {source: 'pkg.mod:make', args: {n: 3}, limit: 2}}\n"
    tasks = load_text(tmp_path, text).tasks
    assert tasks.train is not None
    assert tasks.train.source == "a.jsonl"
    assert tasks.eval is not None
    assert (tasks.eval.source, tasks.eval.args, tasks.eval.limit) == ("pkg.mod:make", {"n": 3}, 2)


def test_scalars_follow_yaml_1_2(tmp_path: Path) -> None:
    text = MINIMAL + "trainer: {learning_rate: 1e-5}\nagents: {train: [no, 12:30, 2026-01-31, on]}\nrun: {seed: 010}\n"
    config = load_text(tmp_path, text)
    assert config.trainer.learning_rate == 1e-5
    assert config.agents.train == ("no", "12:30", "2026-01-31", "on")
    assert config.run.seed == 10


def test_paths_are_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    monkeypatch.setenv("DATA", "/data")
    text = """\
agent: {command: [solve], workspace: ~/program, files: {~/.rc: x}}
tasks: {train: $DATA/a.jsonl, eval: {source: "${DATA}/b.jsonl"}}
policy: {model: ~/model}
policies: {p: {agents: [solve], model: $DATA/model}}
run: {dir: ~/runs}
"""
    config = load_text(tmp_path, text, "tasks.train=~/c.jsonl")
    shown = config.model_dump()
    assert (shown["agent"]["workspace"], config.run.dir) == ("/home/u/program", "/home/u/runs")
    assert (config.policy.model, config.policies["p"].model) == ("/home/u/model", "/data/model")
    assert (shown["tasks"]["train"]["source"], shown["tasks"]["eval"]["source"]) == ("/home/u/c.jsonl", "/data/b.jsonl")
    assert list(shown["agent"]["files"]) == ["~/.rc"]  # the program's home, not the user's


def test_merge_keys(tmp_path: Path) -> None:
    text = """\
policy: {model: m}
policies:
  a: &a {agents: [x], learning_rate: 0.1, train_layers: 2}
  b: {<<: *a, agents: [y], train_layers: 3}
"""
    policies = load_text(tmp_path, text).policies
    assert [(p.agents, p.learning_rate, p.train_layers) for p in policies.values()] == [
        (("x",), 0.1, 2),
        (("y",), 0.1, 3),
    ]
    assert refusal(tmp_path, text.replace("0.1", "-1")) == [
        "c.yaml:3: policies.a.learning_rate: found -1, expected greater than 0",
        "c.yaml:4: policies.b.learning_rate: found -1, expected greater than 0",
    ]


def test_an_empty_section_has_its_defaults(tmp_path: Path) -> None:
    assert load_text(tmp_path, MINIMAL + "trainer:\n  # steps: 3\nrollouts:\n") == load_text(tmp_path, MINIMAL)


def test_lora_gets_its_defaults() -> None:
    config = load_config({"policy": {"model": "m", "tuning": "lora"}})
    assert config.policy.lora is not None
    assert config.policy.lora.rank == 16


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["policy.tuning=lora", "policy.lora.target_modules=[q_proj]"],
        ["tasks.sampling=curriculum", "tasks.sampling_floor=0.2"],
        ["credit.rewards=discounted", "credit.gamma=0.9", "credit.group_by=[task, agent]"],
        [
            "credit.rewards=m:f",
            "credit.air={tool_errors: {x: 1}, token_cost: 1e-4, call_cost: 0.1, formats: [{pattern: a, weight: 1}]}",
            "credit.judge={model: m, rubric: [{name: short, text: t, weight: 0.2, agents: [a]}, {name: right, text: u}]}",
        ],
        ["agents.train=[no, '1e-5', ü]", "run.name='12'", "agents.frozen={judge: base}"],
        [
            "policies.a.agents=[x]",
            "policies.a.credit.advantage=rloo",
            "policies.b={agents: [y], lora: {rank: 4}, tuning: lora}",
        ],
        ["tasks.train=m:f", "tasks.train.args={x: '1', y: null}", "policy.upstream.base_url=http://a/v1"],
        ["algorithm.loss=gspo", "algorithm.sequence=row", "algorithm.clip_low=3e-4", "algorithm.clip_high=4e-4"],
        ["algorithm.loss=reinforce", "algorithm.kl.weight=0.01", "algorithm.importance={level: rollout, high: null}"],
    ],
)
def test_the_resolved_file_reads_back_equal(tmp_path: Path, overrides: list[str]) -> None:
    config = load_text(tmp_path, MINIMAL, *overrides)
    assert load_text(tmp_path, dump_config(config)) == config


def test_overrides_win_in_order(tmp_path: Path) -> None:
    text = MINIMAL + "trainer: {steps: 5, betas: [0.8, 0.9]}\n"
    config = load_text(tmp_path, text, "trainer.steps=6", "trainer.steps=7", "run.name=abc", "trainer.threads=")
    assert (config.trainer.steps, config.run.name, config.trainer.threads) == (7, "abc", None)
    assert config.trainer.betas == (0.8, 0.9)


def test_an_override_below_a_short_form(tmp_path: Path) -> None:
    tasks = load_text(tmp_path, MINIMAL + "tasks: {train: a.jsonl}\n", "tasks.train.limit=3").tasks
    assert tasks.train is not None
    assert (tasks.train.source, tasks.train.limit) == ("a.jsonl", 3)


def test_overrides_leave_a_given_dict_alone() -> None:
    data = {"policy": {"model": "m"}}
    load_config(data, ["policy.model=n", "run.seed=1"])
    assert data == {"policy": {"model": "m"}}


def test_all_problems_at_once_with_their_lines(tmp_path: Path) -> None:
    text = """\
agent: foo.bar
tasks:
  train: a.txt
  eval: {source: x.jsonl, limt: 4}
agents: {train: [a, b], frozen: {a: base}}
polcy: {model: x}
trainer:
  learning_rate: fast
  steps: "3"
  betas: [0.9, 2]
credit: {rewards: discounted, advantage: grp}
rollouts: {group_size: yes}
"""
    assert refusal(tmp_path, text, "rollouts.temperature=0", needs=("tasks.train", "reward")) == [
        "c.yaml:1: agent: found 'foo.bar', expected 'module:callable', such as 'examples.text_to_sql.agent:solve'; did you mean"
        " 'foo:bar'?",
        "c.yaml:3: tasks.train.source: found 'a.txt', expected a path that ends in .jsonl, .json, .parquet, or"
        " 'module:callable'",
        "c.yaml:4: tasks.eval.limt: unknown key; did you mean 'limit'? expected one of source, args, limit",
        "c.yaml: policy: missing, but required",
        f"c.yaml:11: credit.advantage: found 'grp', expected {', '.join(map(repr, ADVANTAGE_RULES))},"
        " or 'module:callable'; did you mean 'grpo'?",
        "c.yaml:12: rollouts.group_size: found 'yes', expected a whole number",
        "c.yaml:9: trainer.steps: found '3', expected a whole number",
        "c.yaml:8: trainer.learning_rate: found 'fast', expected a number or auto",
        "c.yaml:10: trainer.betas[1]: found 2, expected less than 1",
        "c.yaml:6: polcy: unknown key; did you mean 'policy'? expected one of agent, reward, prices, tasks, agents, policy, policies,"
        " prompts, credit, algorithm, rollouts, trainer, ray, eval, monitors, endpoint, otlp, run",
        "c.yaml:5: agents.frozen.a: the agent is in agents.train too; remove it from one of them",
        "c.yaml:11: credit.rewards: 'discounted' needs credit.gamma, such as gamma: 0.95",
        "override 'rollouts.temperature=0': rollouts.temperature: at 0 all attempts are equal, so there is no"
        " training signal; use a value above 0 (eval.temperature may be 0)",
        "c.yaml: reward: missing, but required by this command",
    ]


@pytest.mark.parametrize(
    ("text", "invalid"),
    [
        ("credit: {rewards: discounted, gamma: 2}", "credit.gamma: found 2"),
        ("policies: {a: {agents: [x], credit: {rewards: discounted, gamma: 2}}}", "policies.a.credit.gamma: found 2"),
        ("policy: {model: m, tuning: lroa, lora: {rank: 4}}", "policy.tuning: found 'lroa'"),
    ],
)
def test_an_invalid_value_is_not_reported_as_missing_too(tmp_path: Path, text: str, invalid: str) -> None:
    (problem,) = refusal(tmp_path, text if "policy:" in text else MINIMAL + text)
    assert invalid in problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tasks: {train: {source: a.jsonl, args: {n: 1}}}", "tasks.train.args: goes with a source 'module:callable' only"),
        ("agents: {train: []}", "agents.train: the list is empty"),
        ("policy: {model: m, tuning: lora, train_layers: 2}", "policy.train_layers: goes with tuning: full only"),
        ("policy: {model: m, lora: {rank: 4}}", "policy.lora: goes with tuning: lora only"),
        ("policy: {model: m, max_context: 256}", "rollouts.max_tokens: found 256, expected less than policy.max_context"),
        ("credit: {gamma: 0.9}", "credit.gamma: goes with rewards: discounted | gigpo | gae | igpo, but"),
        ("credit: {rewards: outcome}", "credit.rewards: found 'outcome', expected 'broadcast', 'last-call', 'explicit',"),
        ("credit: {rewards: gae, gamma: 1.0}", "credit.advantage: found 'grpo', expected 'reinforce++' or"),
        ("credit: {lam: 0.9}", "credit.lam: goes with rewards: gae only"),
        ("credit: {anchor: exact}", "credit.anchor: goes with rewards: gigpo only, but"),
        ("credit: {air: {formats: [{pattern: '(', weight: 1}]}}", "credit.air.formats[0].pattern: found '(', expected a regular"),
        ("credit: {air: {token_cost: -0.001}}", "credit.air.token_cost: found -0.001, expected"),
        (
            "credit: {air: {formats: [{pattern: a, weight: 1, agent: [x]}]}}",
            "credit.air.formats[0].agent: unknown key; did you mean 'agents'?",
        ),
        ("credit: {air: {tool_eror: 1}}", "credit.air.tool_eror: unknown key; did you mean 'tool_error'?"),
        (
            "rollouts: {group_size: 1}\ncredit: {judge: {model: m}, advantage: none}",
            "rollouts.group_size: found 1, expected 2 or more: a judge compares",
        ),
        ("credit: {judge: {model: m, rubric: []}}", "credit.judge.rubric: the list is empty, expected"),
        ("credit: {judge: {model: m, rubric: 5}}", "credit.judge.rubric: found 5, expected a string"),
        ("credit: {judge: {model: m, rubric: [{name: a b, text: t}]}}", "credit.judge.rubric[0].name: found 'a b', expected"),
        (
            "credit: {judge: {model: m, rubric: [{name: a, text: t, weigth: 1}]}}",
            "credit.judge.rubric[0].weigth: unknown key; did you mean 'weight'?",
        ),
        (
            "credit: {judge: {model: m, rubric: [{name: a, text: t}, {name: a, text: u}]}}",
            "credit.judge.rubric[1].name: 'a' is the name of an earlier criterion",
        ),
        (
            "credit: {judge: {model: m, rubric: [{name: a, text: t, agents: [x, y]}]}}\nagents: {train: [x]}",
            "credit.judge.rubric[0].agents: 'y' is not trained; expected names in agents.train: ['x']",
        ),
        (
            "credit: {judge: {model: m, rubric: [{name: a, text: t, agents: []}]}}",
            "credit.judge.rubric[0].agents: the list is empty; remove the key",
        ),
        (
            "credit: {rewards: gae, gamma: 1.0, advantage: none, judge: {model: m, rubric: [{name: a, text: t}]}}",
            "credit.judge.rubric: found a list of criteria, expected a text: with rewards: gae the critic",
        ),
        ("rollouts: {refill: 2}\ncredit: {advantage: none}", "rollouts.refill: goes with advantages that compare"),
        ("credit: {group_by: [agent, agent]}", "credit.group_by: expected one or more different keys"),
        ("rollouts: {group_size: 1}", "rollouts.group_size: found 1, expected 2 or more: 'grpo' compares attempts"),
        ("policy: {model: m, vllm: {url: 'http://h:1'}}", "policy.vllm: goes with backend: vllm only"),
        (
            "policy: {model: m, backend: vllm, vllm: {url: 'http://h:1', args: [-x]}}",
            "policy.vllm.args: goes with a server that Lightning starts",
        ),
        (
            "agents: {frozen: {judge: base}, train: [a]}\npolicy: {model: m, backend: vllm}",
            "agents.frozen.judge: 'base' is not available with policy.backend: vllm",
        ),
        ("trainer: {max_batch: 8}\npolicy: {model: m, backend: vllm}", "trainer.max_batch: goes with policy.backend: torch only"),
        ("eval: {temperature: 0.001}\npolicy: {model: m, backend: vllm}", "eval.temperature: found 0.001; vLLM supports"),
        ("eval: {temperature: 0, samples: 4}", "eval.samples: found 4, expected 1: at eval.temperature 0"),
        (
            "algorithm: {loss: gspo, clip_low: 3e-4, clip_high: 4e-4}",
            "algorithm.sequence: 'gspo' needs algorithm.sequence: row, rollout or call",
        ),
        ("algorithm: {aggregation: sequence-mean}", "algorithm.sequence: 'sequence-mean' needs algorithm.sequence"),
        (
            "algorithm: {sequence: row}",
            "algorithm.sequence: goes with loss: gspo or aggregation: sequence-mean only, but they are 'ppo' and 'rollout-mean'",
        ),
        ("algorithm: {loss: gspo, sequence: row}", "algorithm.loss: 'gspo' has no default for clip_low and clip_high; set both"),
        ("algorithm: {loss: reinforce, clip_high: 0.3}", "algorithm.clip_high: 'reinforce' has no ratio to clip"),
        ("algorithm: {loss: reinforce, updates_per_step: 2}", "algorithm.updates_per_step: found 2; 'reinforce' has"),
        ("algorithm: {loss: reinforce, mini_batches: 2}", "algorithm.mini_batches: found 2; 'reinforce' has no ratio"),
        ("algorithm: {mini_batches: 65}", "algorithm.mini_batches: found 65, expected at most the 64 rollouts of a step"),
        ("trainer: {min_learning_rate_ratio: 0.1}", "trainer.min_learning_rate_ratio: goes with schedule: linear | cosine"),
        ("trainer: {schedule: cosine, steps: 5, warmup_steps: 5}", "trainer.warmup_steps: found 5, expected less than trainer.steps = 5"),
        ("trainer: {keep_best: true}", "trainer.keep_best: requires evaluations during training; set eval.every"),
        ("eval: {early_stop: {reward: 1.0}}", "eval.early_stop: requires evaluations during training; set eval.every"),
        (
            "eval: {every: 50, early_stop: {reward: 1.0}}",
            "eval.early_stop: there is no evaluation during training: eval.every is 50 and trainer.steps 50",
        ),
        ("eval: {every: 5, early_stop: {}}", "eval.early_stop: without reward or patience the run never"),
        ("eval: {every: 5, early_stop: {reward: 1.0, min_improvement: 0.1}}", "eval.early_stop.min_improvement: goes with patience"),
        ("run: {report_checkpoint: true}", "run.report_checkpoint: goes with run.report_to, which names no tracker"),
        ("run: {report_seconds: 9}", "run.report_seconds: goes with run.report_to, which names no tracker"),
        ("otlp: {timeout_seconds: 9}", "otlp.timeout_seconds: requires otlp.endpoint"),
        ("credit: {air: {truncated_ramp: 9}}", "credit.air.truncated_ramp: has no effect without credit.air.truncated"),
        ("tasks: {sampling: hard}", "tasks.sampling: found 'hard', expected 'auto', 'uniform' or 'curriculum'"),
        ("tasks: {sampling: curriculum, sampling_floor: 1.5}", "tasks.sampling_floor: found 1.5, expected"),
        (
            "tasks: {sampling: uniform, sampling_floor: 0.2}",
            "tasks.sampling_floor: goes with sampling: curriculum only, but tasks.sampling is 'uniform'",
        ),
        ("algorithm: {clip_dual: 2.0}", "algorithm.clip_dual: goes with loss: dual-clip only"),
        ("algorithm: {aggregation: constant}", "algorithm.aggregation: 'constant' needs algorithm.constant_tokens"),
        ("algorithm: {constant_tokens: 9}", "algorithm.constant_tokens: goes with aggregation: constant only"),
        ("algorithm: {importance: {low: 3.0}}", "algorithm.importance.low: found 3.0, which is not below"),
        ("algorithm: {importance: {kind: mask, high: null}}", "algorithm.importance.kind: 'mask' has no effect without low and high"),
    ],
)  # fmt: skip
def test_invalid_combinations(tmp_path: Path, text: str, expected: str) -> None:
    (problem,) = refusal(tmp_path, text if "policy:" in text else f"{text}\n{MINIMAL}")
    place, rest = problem.split(": ", 1)
    assert place == ("c.yaml" if "max_tokens" in expected else "c.yaml:1")
    assert rest.startswith(expected)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.steps", "override 'trainer.steps': expected key.sub=value, such as trainer.steps=10"),
        ("trainer..steps=1", "override 'trainer..steps=1': expected key.sub=value, such as trainer.steps=10"),
        (
            "policy.model.x=1",
            "override 'policy.model.x=1': policy.model.x: policy.model is 'some/model', expected a section",
        ),
        ("agents.train=[a", "override 'agents.train=[a': agents.train: the value is not valid YAML: while parsing"),
        ("rollout.group_size=4", "override 'rollout.group_size=4': rollout: unknown key; did you mean 'rollouts'?"),
        ("trainer.stepz=1", "override 'trainer.stepz=1': trainer.stepz: unknown key; did you mean 'steps'?"),
        ("trainer=5", "override 'trainer=5': trainer: found 5, expected a section with keys below it"),
        ("run.seed=1.5", "override 'run.seed=1.5': run.seed: found 1.5, expected a whole number"),
        ("eval.every=true", "override 'eval.every=true': eval.every: found True, expected a whole number"),
        ("trainer.betas=0.9", "override 'trainer.betas=0.9': trainer.betas: found 0.9, expected a list"),
        ("agents.frozen={1: m}", "override 'agents.frozen={1: m}': agents.frozen[1]: found 1, expected a string"),
    ],
)
def test_a_bad_override_is_named(tmp_path: Path, override: str, expected: str) -> None:
    (problem,) = refusal(tmp_path, MINIMAL, override)
    assert problem.startswith(expected)


def test_duplicate_keys(tmp_path: Path) -> None:
    text = MINIMAL + "trainer:\n  steps: 1\n  steps: 2\n"
    assert refusal(tmp_path, text) == ["c.yaml:4: trainer.steps: duplicate key, first at c.yaml:3; remove one"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("policy: {model: m\n", "c.yaml:2: not valid YAML"),
        ("- a\n", "c.yaml: expected a mapping of sections, found list"),
        ("a: &x {b: *x}\n", "c.yaml:1: not valid YAML: an alias that contains itself"),
        ("a: 1\n---\nb: 2\n", "c.yaml:2: not valid YAML"),
        ("{[1]: 2}\n", "not valid YAML"),
    ],
)
def test_files_that_are_not_a_configuration(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text)
    assert expected in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no configuration file at"):
        load_config(tmp_path / "none.yaml")


def test_needed_keys(tmp_path: Path) -> None:
    text = MINIMAL + "tasks:\n  eval: e.jsonl\n"
    problems = refusal(tmp_path, text, needs=("agent", "tasks.train", "tasks.eval"))
    assert problems == [
        "c.yaml: agent: missing, but required by this command",
        "c.yaml:2: tasks.train: missing, but required by this command",
    ]


def test_made_directly_it_is_checked_too() -> None:
    with pytest.raises(ValueError, match=r"policy\.train_layers: goes with tuning: full only"):
        Config(policy=Policy(model="m", tuning="lora", train_layers=2))


def test_frozen() -> None:
    config = load_config({"policy": {"model": "m"}})
    with pytest.raises(ValueError, match="frozen"):
        config.run = config.run  # type: ignore[misc]


def test_every_key_is_documented_and_the_page_is_current() -> None:
    pages = reference()
    assert [path for path, text in pages.items() if "|  |\n" in text] == []
    folder = Path(__file__).parents[2] / "docs"
    paths = [folder / "configuration.md", *folder.glob("configuration/*.md")]
    written = {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    assert written == pages, "run: python -m docs._generate.configuration"


TWO = "policies: {a: {agents: [x]}, b: {agents: [y]}}\n"


def test_policies_inherit_missing_settings_from_the_common_sections() -> None:
    config = load_config({
        "policy": {"model": "m", "train_layers": 3},
        "trainer": {"learning_rate": 1e-4},
        "credit": {"rewards": "discounted", "gamma": 0.9, "group_by": ["task", "agent"]},
        "policies": {
            "sql": {"agents": ["writer", "rewriter"], "tuning": "lora"},
            "critic": {"agents": ["critic"], "learning_rate": 1e-3, "credit": {"rewards": "broadcast", "advantage": "rloo"}},
        },
    })  # fmt: skip
    assert config.agents.train == ("writer", "rewriter", "critic")
    assert agents_policies(config) == {"writer": "sql", "rewriter": "sql", "critic": "critic"}
    sql, critic = policy_settings(config).values()
    assert (sql.model, sql.tuning, sql.train_layers, sql.learning_rate) == ("m", "lora", None, 1e-4)
    assert sql.lora is not None
    assert (critic.tuning, critic.train_layers, critic.lora, critic.learning_rate) == ("full", 3, None, 1e-3)
    assert sql.credit == config.credit
    found = critic.credit
    assert (found.rewards, found.gamma, found.advantage, found.group_by) == (
        "broadcast",
        None,
        "rloo",
        ("task", "agent"),
    )
    assert list(policy_settings(load_config({"policy": {"model": "m"}}))) == ["policy"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("policies: {policy: {agents: [x]}}", "policies.policy: found 'policy', which is reserved"),
        ("policies: {a/b: {agents: [x]}}", "policies.a/b: found 'a/b', expected a policy's name: a letter, then"),
        ("policies: {a: {}}", "policies.a.agents: missing, but required"),
        ("policies: {a: {agents: []}}", "policies.a.agents: the list is empty"),
        ("policies: {a: {agents: [x], modle: m}}", "policies.a.modle: unknown key; did you mean 'model'?"),
        ("policies: {a: {agents: [x], credit: {advantag: m}}}", "policies.a.credit.advantag: unknown key; did you mean 'advantage'?"),
        (
            "policies: {a: {agents: [x]}, b: {agents: [y, x]}}",
            "policies.b.agents: agent 'x' is in policies.a.agents too; list it once, under one policy",
        ),
        ("agents: {train: [x]}\n" + TWO, "agents.train: found ['x'], but the agents of the policies are ['x', 'y']"),
        ("agents: {frozen: {y: base}}\n" + TWO, "agents.frozen.y: the agent is in agents.train too"),
        ("agents: {frozen: {z: policy}}\n" + TWO, "agents.frozen.z: no policy has the name 'policy'; expected 'base', one of"),
        (
            "agents: {frozen: {z: base}}\npolicies: {a: {agents: [x], model: n}}",
            "agents.frozen.z: 'base' is the initial 'some/model' (policy.model), but no policy",
        ),
        ("policies: {a: {agents: [x], lora: {rank: 4}}}", "policies.a.lora: goes with tuning: lora only"),
        ("policies: {a: {agents: [x], tuning: lora, train_layers: 2}}", "policies.a.train_layers: goes with tuning: full only"),
        ("policies: {a: {agents: [x], credit: {gamma: 0.9}}}", "policies.a.credit.gamma: goes with rewards: discounted"),
        (
            "policies: {a: {agents: [x], credit: {rewards: gae, gamma: 1.0}}}",
            "policies.a.credit.advantage: found 'grpo', expected 'reinforce++' or",
        ),
        ("policy: {model: m, backend: vllm}\n" + TWO, "policy.backend: found 'vllm', expected 'torch': several policies"),
    ],
)  # fmt: skip
def test_invalid_policies(tmp_path: Path, text: str, expected: str) -> None:
    (problem,) = refusal(tmp_path, text if text.startswith("policy: {model") else f"{text}\n{MINIMAL}")
    assert problem.partition(": ")[2].startswith(expected)
