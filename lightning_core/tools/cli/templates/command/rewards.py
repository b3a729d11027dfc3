"""The reward of the program in ``program/``."""

from lightning_core.propagation import ProgramResult


def right_order(task: dict[str, str], result: ProgramResult) -> float:
    """Returns 1 if the program printed the right number, else 0."""
    return float(result.exit_code == 0 and result.stdout.strip() == task["order"])
