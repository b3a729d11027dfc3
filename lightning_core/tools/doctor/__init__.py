"""Checks of an environment, a configuration and an agent before they are trained; see docs/doctor.md.

Checks are pure functions over evidence. `gather` and `trials` gather the evidence, `examine` combines it.
"""

from lightning_core.tools.doctor.examine import examine, examine_environment
from lightning_core.tools.doctor.finding import Finding, Level

__all__ = ["Finding", "Level", "examine", "examine_environment"]
