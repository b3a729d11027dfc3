"""What frameworks do by themselves, beside running agents, is off: telemetry, questions to the user, downloads."""

from __future__ import annotations

import os

import pytest

os.environ |= {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "DISABLE_TELEMETRY": "1",
    "AGNO_TELEMETRY": "false",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "MSWEA_SILENT_STARTUP": "1",
    "GOOGLE_API_KEY": "none",
    "OPENAI_API_KEY": "none",
}


def pytest_configure(config: pytest.Config) -> None:
    """The frameworks' own warnings, some of them while they are imported, are no errors here."""
    config.addinivalue_line("filterwarnings", "ignore")
