"""Exit codes of all commands."""

from __future__ import annotations

from collections.abc import Mapping

OK = 0
ERROR = 1
USAGE = 2
NOT_IMPROVED = 3
BUG = 70
SIGNAL = 128
UNREAD = SIGNAL + 13
"""As of a program that SIGPIPE ends, which Windows does not have."""

MEANINGS: Mapping[str, str] = {
    f"{OK}": "the command is complete; for `train`, whether or not the policy improved",
    f"{ERROR}": "an error during the command, of the machine too, such as a full disk; `doctor` found a problem; the rollout of "
    "`trace CONFIG` failed; `runs remove` was declined",
    f"{USAGE}": "wrong arguments or configuration, or a package that they need is not installed; nothing was trained. A name in "
    "`agents.train` that no agent has is found in the first rollouts: the run's folder then exists",
    f"{NOT_IMPROVED}": "`train --require-improvement`: complete, but the 95% interval of the improvement includes 0. With fewer than 6 "
    "held-out tasks there is no interval: the command ends with 2 at its start",
    f"{BUG}": "an unexpected exception: a bug of lightning-rl, or of code that it was given. The message has the file with the traceback",
    f"{SIGNAL} + N": f"interrupted by signal N: {SIGNAL + 2} for Ctrl-C (SIGINT), {SIGNAL + 15} for SIGTERM, {SIGNAL + 1} for SIGHUP, "
    f"{UNREAD} (SIGPIPE) if the reader of standard output closed it before the command was complete",
}
"""By code, as in docs/command-line.md."""
