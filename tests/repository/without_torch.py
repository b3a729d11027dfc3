"""A pytest plugin for an environment without torch: `pytest -p tests.repository.without_torch` skips the tests that import it.

Only a missing torch, or our error that names the extra `torch`, is a reason to skip. Without the plugin both stay errors.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from lightning_core.errors import MissingExtra

REASON = "torch is not installed"


def is_torch_missing(error: BaseException | None) -> bool:
    """Whether ``error`` or its cause is a failed import of torch."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            return True
        if isinstance(error, MissingExtra) and error.extra == "torch":
            return True
        error = getattr(error, "cause", None) or error.__cause__
    return False


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    report = yield
    call = getattr(report, "call", None)
    if report.failed and call is not None and call.excinfo is not None and is_torch_missing(call.excinfo.value):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 1, f"Skipped: {REASON}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None]:
    yield from skip_without_torch()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    yield from skip_without_torch()


def skip_without_torch() -> Generator[None]:
    try:
        yield
    except Exception as error:
        if is_torch_missing(error):
            pytest.skip(REASON)
        raise
