"""The formats that are read, and their recognition."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_core.errors import ConfigError
from lightning_core.tools.interchange.atif import ATIF
from lightning_core.tools.interchange.langfuse import LANGFUSE
from lightning_core.tools.interchange.langsmith import LANGSMITH
from lightning_core.tools.interchange.logfire import LOGFIRE
from lightning_core.tools.interchange.mlflow import MLFLOW
from lightning_core.tools.interchange.openai_stored import OPENAI_STORED
from lightning_core.tools.interchange.otlp import OTLP
from lightning_core.tools.interchange.phoenix import PHOENIX
from lightning_core.tools.interchange.source_format import Document, SourceFormat

SOURCE_FORMATS = (OTLP, ATIF, PHOENIX, LANGSMITH, MLFLOW, LOGFIRE, OPENAI_STORED, LANGFUSE)
"""In the order in which they are tried; no document has two of them."""


def choose_format(name: str | None, documents: Sequence[Document]) -> SourceFormat:
    """The format called ``name``; None: that of the first document of a known one. Raises `ConfigError` if there is none."""
    names = [source.name for source in SOURCE_FORMATS]
    if name is not None:
        for source in SOURCE_FORMATS:
            if source.name == name:
                return source
        raise ConfigError(f"--from {name!r}: expected one of {', '.join(names)}")
    for document in documents:
        for source in SOURCE_FORMATS:
            if source.recognize(document):
                return source
    keys = f"an object with the keys {', '.join(sorted(documents[0])[:8])}" if documents else "no JSON object"
    raise ConfigError(
        f"the format of the traces is not known: found {keys}. Choose one with --from: {', '.join(names)}"
    )
