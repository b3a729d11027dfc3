"""Every error of Lightning, and what becomes of it.

There are two regimes, and one border between them.

*Inside somebody's agent run* (``capture``, ``patching``, ``policy.client``, the integrations) nothing of ours may break the
host: we never raise, never swallow the host's exception, never change its result. What goes wrong there passes through
``capture.record()``, which counts it on the rollout and logs it once. A strict rollout (the default in ``fit``) raises
`CaptureError` when it ends, so that lost training data is never silent.

*On the training side* (``transitions``, ``credit``, ``trainers``, ``loop``) errors propagate.

An agent's own exception is neither: it is data. The runner stores it on the rollout, which counts as failed with its reward;
an infrastructure failure (`InfrastructureError`) is retried, and then left out of baseline and loss, and counted.

Each class also inherits the built-in exception that a caller would look for.
"""

from __future__ import annotations

from collections.abc import Mapping


class LightningError(Exception):
    """Base of every error that Lightning raises on purpose."""


class ConfigError(LightningError, ValueError):
    """The configuration says something that cannot be honoured. Raised before anything runs."""


class MissingExtra(LightningError, ImportError):
    """A package that belongs to an optional extra is not installed."""

    def __init__(self, package: str, extra: str, why: str) -> None:
        super().__init__(f"{why} needs the package {package!r}: pip install 'lightning-rl[{extra}]'")
        self.package = package
        self.extra = extra

    def __reduce__(self) -> tuple[object, ...]:
        return (LightningError, (str(self),))


class IntegrationUnavailable(LightningError, ImportError):
    """An integration that was asked for by name cannot be used: its framework is missing or out of range."""


class CaptureError(LightningError, RuntimeError):
    """A strict rollout ended after something in it could not be recorded."""


class RewardError(LightningError, ValueError):
    """A reward is not a finite number."""


class CreditError(LightningError, ValueError):
    """A credit rule was asked for something that it cannot do."""


class InfrastructureError(LightningError, RuntimeError):
    """The machinery failed, not the agent: the endpoint, an upstream server, a time limit of ours."""


class UpstreamError(InfrastructureError):
    """A model server that a call was forwarded to could not be reached, or did not answer as it should."""


class UpstreamRefusal(UpstreamError):
    """It answered with an HTTP error, which the agent gets as it is. ``of_the_agent``: the request was at fault, and not the machinery."""

    def __init__(
        self, message: str, *, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = body
        self.headers = dict(headers or {})

    @property
    def of_the_agent(self) -> bool:
        return self.status in (400, 413, 422)

    def __reduce__(self) -> tuple[object, ...]:
        return (LightningError, (str(self),))


class OverloadError(InfrastructureError):
    """All rollouts together ask more of the policy endpoint than it takes on at a time."""


class PolicyRequestError(LightningError, ValueError):
    """A request to the policy endpoint that cannot be served as it stands; becomes an HTTP error with this text."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param

    def __reduce__(self) -> tuple[object, ...]:
        return (LightningError, (str(self),))


class TrainingError(LightningError, RuntimeError):
    """The trainer cannot take a step: non-finite loss, no rows, a checkpoint that does not fit."""


class ProofError(TrainingError):
    """What is about to be trained on is not what was sampled. The weights are as before."""
