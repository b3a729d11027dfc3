"""The Hugging Face Hub's errors and log messages about a model, in a few words."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


@contextmanager
def retries_once() -> Generator[None]:
    """Log one warning in place of the Hub's two per failed request."""
    logged = False

    def is_other(record: logging.LogRecord) -> bool:
        nonlocal logged
        text = record.getMessage()
        if "thrown while requesting" not in text and not text.startswith("Retrying in"):
            return True
        if not logged:
            logged = True
            logger.warning("the Hugging Face Hub cannot be reached; retrying")
        return False

    requests = logging.getLogger("huggingface_hub.utils._http")
    requests.addFilter(is_other)
    try:
        yield
    finally:
        requests.removeFilter(is_other)


def explain_hub(text: str) -> str | None:
    """A short message for an error of the Hub in transformers' ``text``; None for other errors."""
    if "couldn't connect to" in text:
        return (
            "it is not a folder here, and the Hugging Face Hub cannot be reached to look for it; check the name and the connection, "
            "or set policy.model to a folder"
        )
    if "is not a valid model identifier" in text or "Repo id must" in text or "Repository Not Found" in text:
        return (
            "it is neither a folder here nor a public model on the Hugging Face Hub; check the spelling (owner/name), or log in with "
            "`hf auth login` if it is private"
        )
    if "does not appear to have a file named config.json" in text:
        return (
            "its repository on the Hugging Face Hub has no config.json, like those of adapters and of GGUF files; choose the whole model, "
            "which an adapter's page names as its base model"
        )
    if "gated repo" in text:
        return "it is gated: accept its terms on its page on the Hugging Face Hub, then log in with `hf auth login`"
    return None
