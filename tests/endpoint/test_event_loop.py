"""The endpoint's process may open as many files as its requests need."""

from __future__ import annotations

import resource

from lightning_core.endpoint.transport.event_loop import new_event_loop


def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        new_event_loop(100).close()
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert raised == (1224 if hard == resource.RLIM_INFINITY else min(1224, hard))
        new_event_loop(1).close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == raised
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
