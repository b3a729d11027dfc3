"""The switch's metrics in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from lightning_core.tools.switch.store import ArmCall

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Meters:
    """Counts by agent and arm, of this process.

    ``rule_of``: the agent as the plan lists it. Names that clients choose would be labels without a limit.
    """

    def __init__(self, rule_of: Callable[[str], str | None]) -> None:
        self._rule_of = rule_of
        self.registry = CollectorRegistry()
        labels = ("agent", "arm", "shadow")

        def counter(name: str, text: str, of: tuple[str, ...]) -> Counter:
            return Counter(f"lightning_{name}", text, of, registry=self.registry)

        self._requests = counter("requests", "Answered requests; status 0: no response.", (*labels, "status"))
        self._tokens = counter(
            "tokens", "Tokens that the arms report: input, cached (of the input), output.", (*labels, "kind")
        )
        self._left_out = counter("shadows_left_out", "Shadow requests beyond shadows_at_once.", ("agent", "arm"))
        self._feedback = counter("feedback", "Feedback received.", ("agent", "arm"))
        self._reward = Gauge(
            "lightning_feedback_reward_sum", "Sum of the rewards received.", ("agent", "arm"), registry=self.registry
        )
        self._seconds = Histogram(
            "lightning_request_seconds", "Seconds of a request.", labels, buckets=_SECONDS, registry=self.registry
        )
        self._first = Histogram(
            "lightning_first_byte_seconds",
            "Seconds until the response began.",
            labels,
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._busy = Gauge("lightning_requests_in_progress", "Requests in progress.", ("arm",), registry=self.registry)
        self._share = Gauge(
            "lightning_share", "Share of the conversations of an agent.", ("agent", "arm"), registry=self.registry
        )

    def answered(self, call: ArmCall) -> None:
        """Count ``call``."""
        labels = (self._label(call.agent), call.arm, str(call.shadow).lower())
        self._requests.labels(*labels, str(call.status)).inc()
        self._seconds.labels(*labels).observe(call.seconds)
        if call.first_byte is not None:
            self._first.labels(*labels).observe(call.first_byte)
        counts = {"input": call.input_tokens, "cached": call.cached_tokens, "output": call.output_tokens}
        for kind, count in counts.items():
            if count:
                self._tokens.labels(*labels, kind).inc(count)

    def busy(self, arm: str, change: int) -> None:
        """Count a request in progress, or one less."""
        self._busy.labels(arm).inc(change)

    def shadow_left_out(self, agent: str, arm: str) -> None:
        """Count a shadow request that was not made."""
        self._left_out.labels(self._label(agent), arm).inc()

    def rewarded(self, agent: str, arm: str, reward: float) -> None:
        """Count feedback."""
        self._feedback.labels(self._label(agent), arm).inc()
        self._reward.labels(self._label(agent), arm).inc(reward)

    def shared(self, agent: str, arms: Mapping[str, float]) -> None:
        """Show the shares of an agent."""
        for arm, share in arms.items():
            self._share.labels(agent, arm).set(share)

    def _label(self, agent: str) -> str:
        return self._rule_of(agent) or "other"

    def text(self) -> bytes:
        """All metrics, for ``GET /metrics``."""
        return generate_latest(self.registry)
