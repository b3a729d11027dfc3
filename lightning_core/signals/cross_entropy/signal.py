"""The cross-entropy on chosen tokens of the rollouts, as a token stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_core.credit import Episode
from lightning_core.rollouts.signal import Resources, Signal
from lightning_core.signals.cross_entropy.section import cross_entropy_of
from lightning_core.signals.cross_entropy.token_sources import TokenSources
from lightning_core.transitions import Streams, WeightedSpan


@dataclass(frozen=True, kw_only=True)
class CrossEntropySignal(Signal):
    """The cross-entropy of a run."""

    sources: TokenSources
    weight: float

    def streams(self, episodes: Sequence[Episode]) -> Streams:
        """The chosen tokens of ``episodes``."""
        chosen = self.sources.choose(episodes)
        return Streams(
            cross_entropy={
                call: [WeightedSpan(start, stop, self.weight) for start, stop in spans]
                for call, spans in chosen.spans.items()
            },
            counts={"tokens_ce": 0, "ce_messages_unknown": chosen.unknown},
        )


def open_signal(resources: Resources) -> Signal | None:
    """The cross-entropy of ``algorithm.ce``, if it is set."""
    config = resources.config
    ce = cross_entropy_of(config.algorithm)
    if ce is None:
        return None
    sources = TokenSources(ce, resources.chats, solved=config.eval.solved)
    return CrossEntropySignal(sources=sources, weight=ce.weight)
