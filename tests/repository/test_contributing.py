"""The recipe in CONTRIBUTING.md for a credit rule: its blocks run, its test passes, and the rule can be configured."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from docs._generate.rules import advantage_table
from lightning_core import load_config
from lightning_core.credit import ADVANTAGE_RULES
from lightning_core.errors import ConfigError

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")


def configure(**credit: Any) -> None:
    load_config({"policy": {"model": "m"}, "credit": credit})


def test_a_credit_rule_is_one_function_and_one_test() -> None:
    with pytest.raises(ConfigError, match="'max-scaled'"):
        configure(advantage="max-scaled")
    rule, test = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    namespace: dict[str, Any] = {"__name__": "contributed"}
    exec(compile(rule, "advantage_rules.py", "exec"), namespace)
    exec(compile(test, "test_credit.py", "exec"), namespace)
    (check,) = (value for name, value in namespace.items() if name.startswith("test_"))
    check()
    configure(advantage="max-scaled", advantage_args={"floor": 0.1})
    with pytest.raises(ConfigError, match="has no argument 'flor'"):
        configure(advantage="max-scaled", advantage_args={"flor": 0.1})
    assert "`(v − μ) / d`, with d the largest distance from μ." in advantage_table()
    assert ADVANTAGE_RULES["max-scaled"].function is namespace["max_scaled"]
