"""Rejects folders without a complete model, stating what was found and what to do."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_core.errors import ConfigError, LightningError
from lightning_core.model.hub import explain_hub, retries_once
from lightning_core.model.out_of_memory import is_out_of_memory

logger = logging.getLogger(__name__)

_UNQUANTISED = {"fp8", "mxfp4", "mxfp8"}
"""Formats of weights that transformers dequantizes exactly while it reads them."""
_COMPLETE = "a complete Hugging Face folder, with config.json, weights and tokenizer"
_ADAPTER = "adapter_config.json"
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json", "*.model", "*.tiktoken")


@contextmanager
def refusing(path: object, part: str = "model") -> Generator[None]:
    """Turn an error of transformers about a model into `ConfigError`. ``part``: the part being loaded, such as the tokenizer."""
    try:
        with retries_once():
            yield
    except LightningError:
        raise
    except Exception as error:  # a damaged file can raise anything: errors of safetensors, json, torch, TypeError
        if is_out_of_memory(error):
            raise
        folder = Path(str(path))
        why = _without_tokenizer_json(error, folder) if part.startswith("tokenizer") else None
        raise ConfigError(f"the {part} {str(path)!r} cannot be loaded: {why or _explain(error, folder)}") from error


def _without_tokenizer_json(error: Exception, folder: Path) -> str | None:
    """The message for a tokenizer that transformers would have to make from a SentencePiece file; None for others."""
    if not (folder / "tokenizer.model").is_file() or (folder / "tokenizer.json").is_file():
        return None
    return (
        f"it has tokenizer.model and no tokenizer.json, and transformers cannot convert the former here ({str(error).strip()}). Copy "
        "tokenizer.json, tokenizer_config.json and the chat template of the original model to the folder; if it has none, run: pip install "
        "-U sentencepiece protobuf"
    )


def _explain(error: Exception, folder: Path) -> str:
    text = str(error).strip()
    if "trust_remote_code" in text:
        return (
            "it needs its own Python code (auto_map in its configuration), and Lightning runs no code of models; choose a "
            "model of a type that transformers includes"
        )
    if not folder.is_dir() and (why := explain_hub(text)) is not None:
        return why
    if type(error).__name__ == "SafetensorError":
        return (
            f"its weights are damaged or incomplete ({text}); expected safetensors files: copy or download them again"
        )
    if isinstance(error, OSError) and folder.is_dir():
        return f"{text.rstrip('.')}; expected {_COMPLETE}: copy or download it again"
    if isinstance(error, OSError | ValueError | KeyError | ImportError):
        return text
    return f"{type(error).__name__}: {text}; use an undamaged copy of the model"


def check_kind(path: object) -> None:
    """Raise `ConfigError` if ``path`` is a folder with an adapter or GGUF files instead of a model's weights."""
    folder = Path(str(path))
    if not folder.is_dir() or any(folder.glob("*.safetensors.index.json")) or any(map(_is_weights, folder.iterdir())):
        return
    if (folder / _ADAPTER).is_file():
        base = _base_of(folder)
        raise ConfigError(
            f"the folder {str(path)!r} has an adapter ({_ADAPTER}) and no weights of a model. Merge the adapter into its base model"
            f"{'' if base is None else f', {base!r}'} (peft: model.merge_and_unload().save_pretrained(FOLDER), with the tokenizer), and "
            f"use that folder; or set policy.model to the base model and policy.tuning: lora, which begins with a new adapter"
        )
    if files := sorted(file.name for file in folder.glob("*.gguf")):
        raise ConfigError(
            f"the folder {str(path)!r} has weights in GGUF files only ({', '.join(files[:3])}{' …' if len(files) > 3 else ''}), which are "
            f"made for llama.cpp and cannot be trained. Use the model that they were made from, as {_COMPLETE}"
        )


def _is_weights(file: Path) -> bool:
    return file.suffix in (".safetensors", ".bin") and not file.name.startswith("adapter_")


def _base_of(folder: Path) -> str | None:
    """The base model of the adapter in ``folder``, as its file names it."""
    try:
        found = json.loads((folder / _ADAPTER).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None


def check_folder(path: object, files: Iterable[str], missing: str) -> None:
    """Raise `ConfigError` if ``path`` is a folder without any of ``files``, which are patterns. ``missing``: their name."""
    folder = Path(str(path))
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in files):
        names = sorted(file.name for file in folder.iterdir())
        listed = f"only {', '.join(names[:8])}{' …' if len(names) > 8 else ''}" if names else "nothing"
        raise ConfigError(f"the folder {str(path)!r} has no {missing}: it contains {listed}; expected {_COMPLETE}")


def check_tokenizer_files(path: object) -> None:
    """Raise `ConfigError` if ``path`` is a folder without a tokenizer."""
    check_kind(path)
    check_folder(path, _TOKENIZER_FILES, "tokenizer (tokenizer.json)")


def unquantise(path: object, config: Any) -> None:
    """Change ``config`` so that weights in 8-bit or 4-bit floats are dequantized, with a warning.

    Raises `ConfigError` for weights that are quantized in any other way.
    """
    for part in (config, config.get_text_config()):
        quantised: Mapping[str, Any] | None = getattr(part, "quantization_config", None)
        if not quantised:
            continue
        method = str(quantised.get("quant_method"))
        if method not in _UNQUANTISED:
            raise ConfigError(
                f"the weights of {str(path)!r} are quantised (quantization_config in config.json: {method!r}), which cannot be "
                "trained; choose the model's unquantised weights, and policy.tuning: lora if they need too much memory"
            )
        if not quantised.get("dequantize"):
            logger.warning(
                "the weights of %r are quantised (%s) and are dequantised while they are loaded: they need the memory of "
                "unquantised weights, and checkpoints and exports are not quantised",
                str(path),
                method,
            )
        part.quantization_config = {**quantised, "dequantize": True}


@contextmanager
def without_report() -> Generator[None]:
    """Drop transformers' report about missing and unknown weights; see `check_weights`."""

    def is_other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    reporting = logging.getLogger("transformers.modeling_utils")
    reporting.addFilter(is_other)
    try:
        yield
    finally:
        reporting.removeFilter(is_other)


def check_weights(path: object, model: Any, loading: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if a weight of ``model`` is missing or has another shape in the checkpoint; log unknown ones.

    ``loading``: transformers' loading info, without tied weights and weights that checkpoints never have.
    """
    if unknown := sorted(loading["unexpected_keys"]):
        logger.warning(
            "the checkpoint %r has %d weights that %s does not have; they are ignored: %s",
            str(path),
            len(unknown),
            type(model).__name__,
            _listed(unknown),
        )
    if shapes := sorted(loading["mismatched_keys"]):
        name, stored, expected = shapes[0]
        raise ConfigError(
            f"the weights of {str(path)!r} do not fit its config.json: {len(shapes)} have other shapes, such as {name!r}, which is "
            f"{list(stored)} and should be {list(expected)}; use config.json and weights of the same model"
        )
    missing: Collection[str] = sorted(loading["missing_keys"])
    if not missing:
        return
    head = model.get_output_embeddings()
    output = {f"{name}.weight" for name, module in model.named_modules() if module is head}
    if set(missing) & output:
        kind = model.config.architectures
        why = (
            f"the output layer is among them, so this is the checkpoint of a model without one, such as a base model or a classifier "
            f"(architectures in config.json: {kind}); choose a checkpoint of a causal language model"
        )
    else:
        why = "they would be random; copy or download the model again"
    raise ConfigError(
        f"the checkpoint {str(path)!r} lacks {len(missing)} weights of {type(model).__name__}: {_listed(missing)}: {why}"
    )


def check_vocabulary(path: object, tokenizer: Any, rows: int) -> None:
    """Raise `ConfigError` if prompts can have tokens without one of the ``rows`` of the embeddings.

    Added tokens that neither text nor the chat template produces, such as Gemma 3's token for images, get a warning.
    """
    ids: Mapping[str, int] = tokenizer.get_vocab()
    outside = {token: number for token, number in ids.items() if number >= rows}
    if not outside:
        return
    template = tokenizer.chat_template or ""
    template = template if isinstance(template, str) else "\n".join(template.values())
    # In messages, the text of added tokens is quoted; added tokens of white space are text.
    added = tokenizer.get_added_vocab()
    starts = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token}
    produced = [t for t in outside if t not in added or not t.strip() or t in template or t in starts]
    sizes = f"the tokenizer of {str(path)!r} has ids up to {max(outside.values())}, but the model has {rows} embeddings"
    if produced:
        raise ConfigError(
            f"{sizes}: {len(produced)} tokens of prompts have none, such as {produced[0]!r} ({outside[produced[0]]}); use the "
            "tokenizer of this model, or resize the model's embeddings"
        )
    logger.warning(
        "%s; the %d tokens without one are never in a chat's prompt: %s", sizes, len(outside), [*outside][:4]
    )


def _listed(names: Collection[str]) -> str:
    """``names`` without the numbers of layers, at most eight."""
    patterns = [*dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", name) for name in names)]
    shown = patterns if len(patterns) < len(names) and len(names) > 8 else [*names]
    return ", ".join(shown[:8]) + (" …" if len(shown) > 8 else "")
