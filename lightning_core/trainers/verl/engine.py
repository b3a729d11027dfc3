"""verl's FSDP engine, with the constraints of sampled responses applied to its logits.

verl imports this module (``actor_rollout_ref.model.external_lib``) and finds the engine in its registry: an engine for a vendor precedes
one for all vendors. The trained policy and the reference are such engines, so logprobs, entropies and KL are those of the distribution
that was sampled from.
"""

from __future__ import annotations

import os
from typing import Any

from verl.utils.device import get_vendor
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from lightning_core.model.constraint import Constraints
from lightning_core.trainers.verl.constrained_rows import exclude, sampled_places

_VENDOR = os.environ.get("VERL_ENGINE_VENDOR") or get_vendor()


class ConstrainedEngine(FSDPEngineWithLMHead):  # pyright: ignore[reportUntypedBaseClass]
    """An engine that excludes the tokens that were not allowed in the place of each constrained token."""

    _constraints: Constraints | None = None

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, Any]:
        """See verl. The logits are [1, S, V] without padding, else [B, L, V]."""
        places = list(sampled_places(micro_batch))
        if places:
            logits = output.logits
            if self._constraints is None:
                self._constraints = Constraints(self.model_config.tokenizer, logits.shape[-1])
            exclude(logits, places, self._constraints)
        return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)


EngineRegistry.register("language_model", ["fsdp", "fsdp2"], device=["cuda", "npu"], vendor=[_VENDOR])(
    ConstrainedEngine
)
