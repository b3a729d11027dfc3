"""The programs of the identity benchmark, in the order in which they run."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tests.integrations.identity.batchers import batchers
from tests.integrations.identity.lazy_results import lazy_results
from tests.integrations.identity.processes import process_pools, processes, subprocesses
from tests.integrations.identity.rollouts import Kind
from tests.integrations.identity.sub_graphs import PATHS, sub_graphs
from tests.integrations.identity.threads import kept_runners, thread_pools, threads

KINDS: Mapping[str, Kind] = MappingProxyType({
    "threads": Kind(threads, share=0.12, turns=6),
    "thread pools": Kind(thread_pools, share=0.12, turns=6),
    "kept event loops": Kind(kept_runners, share=0.05, turns=5),
    "batchers": Kind(batchers, share=0.10, turns=6),
    "lazy results": Kind(lazy_results, share=0.10, turns=6),
    "sub-graphs": Kind(sub_graphs, share=0.10, turns=4, train=PATHS),
    "process pools": Kind(process_pools, share=0.06, turns=5),
    "processes": Kind(processes, share=0.006, turns=10, concurrency=2),
    "subprocesses": Kind(subprocesses, share=0.006, turns=10, concurrency=2),
})  # fmt: skip
"""Shares sum to two thirds; the rest is the graph of ``storm.py``. Processes take seconds to start, so they get few calls."""
