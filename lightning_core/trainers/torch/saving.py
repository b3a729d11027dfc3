"""Writes a policy of the embedded trainer: its weights in a checkpoint, or as one model."""

from __future__ import annotations

from pathlib import Path

from lightning_core.config.resolve import PolicySettings
from lightning_core.model import peft
from lightning_core.model.load import LoadedModel
from lightning_core.model.merge import merge
from lightning_core.model.saved import write_model
from lightning_core.model.source import resolve_model
from lightning_core.model.tuning import Tuning
from lightning_core.model.untied import is_tied, untie_saved


def write_weights(
    folder: Path, loaded: LoadedModel, tuning: Tuning, policy: PolicySettings, *, earlier: Path | None
) -> str:
    """Write the model, or with LoRA the adapter, and the tokenizer; returns the file's name with the trained weights.

    ``earlier``: a checkpoint with the same frozen weights, which are linked.
    """
    loaded.tokenizer.save_pretrained(folder)
    if policy.lora is None:
        return write_model(folder, loaded.model, tuning.masters, earlier=earlier)
    base = str(resolve_model(policy.model))
    peft.write_adapter(folder, tuning.masters, alpha=policy.lora.alpha, model=loaded.model, base=base)
    return peft.WEIGHTS


def write_merged(folder: Path, loaded: LoadedModel, tuning: Tuning, policy: PolicySettings, *, untied: bool) -> None:
    """Write the policy as a Hugging Face folder, with adapters merged into the weights; see `merge`.

    ``untied``: write the output layer separately, even if the model shares it with the embeddings.
    """
    weights = loaded.model.state_dict()
    if policy.lora is not None:
        weights |= merge(loaded.model, tuning.parameters, alpha=policy.lora.alpha)
    loaded.model.save_pretrained(folder, state_dict=weights)
    loaded.tokenizer.save_pretrained(folder)
    if untied and is_tied(loaded.model):
        untie_saved(folder, loaded.model)
