"""Monitors of agents and their environment: failures, missing calls, changed histories."""

from __future__ import annotations

from lightning_core.chat.history.conversations import ADVICE, CHANGES
from lightning_core.config.monitor_registry import HeldOut, History, Share, Steps, monitor
from lightning_core.observers.monitors.reading import last, mean, period, share, total, weighted_mean

_CONTINUED = ("context_clean", "context_realigned", "context_forked", "context_rewritten")
_FEW_CALLS = 10
_REASONS = {
    "invalid": "had an invalid reward",
    "timeout": "took too long (raise the limit that lightning-rl trace names, rollouts.total_seconds or rollouts.timeout_seconds, or lower "
    "rollouts.concurrency)",
    "overflow": "filled the context (shorten the prompts, or raise policy.max_context if it is below the model's own limit)",
    "refused": "made a request that was refused",
    "unauthorized": "sent another key",
    "late": "sent a request too slowly",
    "stream_error": "met an error inside a stream",
}
"""Statuses of rollouts that are left out, apart from infrastructure failures."""
OF_INFRASTRUCTURE = (
    "raise rollouts.retries, or lower rollouts.concurrency, if the provider is slow or limits requests; correct a key or an address that "
    "it refuses"
)
"""The advice if the rollouts that are left out had infrastructure failures."""
OF_FAILURES = (
    "Correct the agent: lightning-rl trace lists the errors. If the model's responses cause them, return a low reward instead of "
    "raising"
)
"""The advice if rollouts failed."""


@monitor("failed_rollouts")
def failed_rollouts(history: History, held_out: HeldOut, *, steps: Steps = 3, at_least: Share = 0.5) -> str | None:
    """A share of `at_least` of the rollouts failed: the agent raised an exception, or exceeded the time limit."""
    lines = last(history, steps)
    failed = share(lines, "rollouts_failed", "rollouts")
    if failed is None or failed < at_least:
        return None
    return (
        f"{failed:.0%} of the rollouts of {period(steps)} failed: the agent raised an exception, or exceeded "
        f"rollouts.timeout_seconds. They are trained with the reward so far, else 0. {OF_FAILURES}"
    )


@monitor("left_out")
def left_out(history: History, held_out: HeldOut, *, steps: Steps = 3, at_least: Share = 0.1) -> str | None:
    """A share of `at_least` of the rollouts was left out: infrastructure failures, limits of time, refused requests, or invalid rewards."""
    lines = last(history, steps)
    count = share(lines, "rollouts_left_out", "rollouts")
    if count is None or count < at_least:
        return None
    numbers = {text: total(lines, f"rollouts_{status}") for status, text in _REASONS.items()}
    causes = [f"{number:.0f} {text}" for text, number in numbers.items() if number]
    advice = "lightning-rl trace lists the errors"
    if total(lines, "rollouts_left_out") > sum(numbers.values()):
        causes.append(
            f"{'the others' if causes else 'they'} had an infrastructure failure, such as a provider that does not answer or a rate limit"
        )
        advice += f"; {OF_INFRASTRUCTURE}"
    return (
        f"{count:.0%} of the rollouts of {period(steps)} were left out: {', '.join(causes)}. Tasks that fail often are trained less. "
        f"{advice}"
    )


@monitor("caught_refusals")
def caught_refusals(history: History, held_out: HeldOut, *, steps: Steps = 3, at_least: Share = 0.1) -> str | None:
    """In a share of `at_least` of the rollouts the last request of any agent was refused, and the rollout returned a result."""
    lines = last(history, steps)
    caught = share(lines, "rollouts_caught_refusal", "rollouts")
    if caught is None or caught < at_least:
        return None
    own = weighted_mean(lines, "caught_refusal_reward", "rollouts_caught_refusal")
    every = weighted_mean(lines, "reward", "rollouts")
    return (
        f"in {caught:.0%} of the rollouts of {period(steps)} an agent's last request was refused, but the agent caught the error, and the "
        f"rollout returned a result. These rollouts are trained with its reward: {own:.3g} on average, against {every:.3g} over all "
        "rollouts. Correct the request: lightning-rl trace lists the reasons. If the model did not cause the refusal, let the agent raise: "
        "rollouts.on_refused then decides whether the rollout counts"
    )


@monitor("no_calls")
def no_calls(history: History, held_out: HeldOut, *, steps: Steps = 3, at_least: Share = 0.5) -> str | None:
    """In a share of `at_least` of the rollouts no trained agent made a model call."""
    lines = last(history, steps)
    silent = share(lines, "rollouts_without_calls", "rollouts")
    if silent is None or silent < at_least:
        return None
    return (
        f"in {silent:.0%} of the rollouts of {period(steps)} no trained agent made a model call, so there is nothing to train. The agent "
        "has a cache, answers without the model, or uses agents that agents.train does not name. Disable caches, and compare "
        "agents.train with the names that lightning-rl trace lists"
    )


@monitor("shared_state")
def shared_state(history: History, held_out: HeldOut, *, steps: Steps = 3, at_least: Share = 0.1) -> str | None:
    """A share of `at_least` of the rollouts began with text that was sampled in another rollout."""
    lines = history[-steps:]
    found = mean(lines, "shared_state")
    if found is None or found < at_least:
        return None
    return (
        f"in {found:.0%} of the rollouts of {period(len(lines))} the first prompt has a response that was sampled in another rollout, so "
        "attempts see earlier answers. An object that several rollouts share keeps the conversation: a LangGraph checkpointer with a "
        "fixed thread_id, a SQLiteSession, a team that is not reset, a list at the top of the module. Create it in the agent's function, "
        "or set rollouts.fresh: true, which runs each rollout in a new process (a file or server keeps its state)"
    )


@monitor("forked_contexts")
def forked_contexts(history: History, held_out: HeldOut, *, steps: Steps = 3, at_least: Share = 0.5) -> str | None:
    """A share of `at_least` of the later calls of conversations does not continue the recorded tokens, so each is
    its own training row."""
    lines = last(history, steps)
    continued = total(lines, *_CONTINUED)
    rewritten = total(lines, "context_rewritten")
    forked = total(lines, "context_forked") - total(lines, *(f"context_forked_{cause}" for cause in CHANGES))
    if not lines or continued < _FEW_CALLS or (forked + rewritten) / continued < at_least:
        return None
    fraction = (
        f"{(forked + rewritten) / continued:.0%} of the later calls in conversations of {period(steps)} do not continue the recorded "
        "tokens; each is encoded and trained as a separate row, which takes longer"
    )
    if forked >= rewritten:
        return (
            f"{fraction}. The chat template renders earlier turns differently in later prompts, such as without their reasoning. Set "
            "policy.chat_template_kwargs so that it keeps them, if the template allows it"
        )
    most = max(CHANGES, key=lambda cause: total(lines, f"context_new_{cause}", f"context_forked_{cause}"))
    return (
        f"{fraction}. The agent changes its history, most often with the cause {most!r}: {ADVICE[most]}. lightning-rl trace names the "
        "first message that differs"
    )
