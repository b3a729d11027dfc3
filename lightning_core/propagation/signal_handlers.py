"""Reports signal handlers that agents and reward functions set on another thread than the main one.

Python refuses them with a ValueError. Libraries catch it: math_verify, which limits its time with ``SIGALRM``, then takes every
answer for wrong.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from typing import Any

from lightning_core.capture.patching import Patches
from lightning_core.capture.scope import current_address, current_rollout
from lightning_core.errors import COUNTED, Repeats
from lightning_core.trace import REWARD_FUNCTION

logger = logging.getLogger(__name__)

_repeats = Repeats()


def install_signal_handlers(patches: Patches) -> None:
    """Log a warning where Python refuses a signal handler."""
    patches.wrap(signal, "signal", _signal)
    patches.on_undo(_repeats.clear)


def _signal(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    try:
        return wrapped(*args, **kwargs)
    except ValueError:
        if threading.current_thread() is not threading.main_thread() and current_rollout() is not None:
            _warn()
        raise


def _warn() -> None:
    address = current_address()
    is_reward = address is not None and address.agent == REWARD_FUNCTION
    if (times := _repeats.count(is_reward)) is not None:
        logger.warning(
            "%s sets a signal handler on a thread, which Python allows on the main thread only%s. If a library catches the ValueError, "
            "such as math_verify, every reward may be 0. Set rollouts.executor: process, which runs functions at the top level of a "
            "module on a main thread; or switch off the time limit that needs the signal",
            "the reward function" if is_reward else "the agent",
            times,
            extra=COUNTED,
        )
