"""Exit codes of all commands; docs/command-line.md lists them."""

from __future__ import annotations

OK = 0
ERROR = 1
"""An error during the command; ``doctor``: a problem; ``trace`` of one task: its rollout failed; ``runs remove``: declined."""
USAGE = 2
"""Wrong arguments or configuration, or a package that they need is not installed. Nothing was trained.

A name in ``agents.train`` that no agent has is found in the first rollouts; the run's folder then exists.
"""
NOT_IMPROVED = 3
"""``train --require-improvement``: the run is complete, and no significant improvement was shown."""
SIGNAL = 128
"""Plus the number of the signal that interrupted the command: 130 for SIGINT (Ctrl-C)."""
