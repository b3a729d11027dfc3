"""The integration that a module is about, installed for its tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_core.capture.integration import Installed


@pytest.fixture
def installed(request: pytest.FixtureRequest) -> Iterator[None]:
    """The integration that the module's ``INTEGRATION`` names is installed."""
    with Installed().installed(request.module.INTEGRATION):
        yield
