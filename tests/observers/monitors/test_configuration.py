"""The section ``monitors``: valid settings, errors, and functions of users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from lightning_core import load_config
from lightning_core.config import dump_config
from lightning_core.config.monitors import configured_monitors, stopping_monitors
from lightning_core.errors import ConfigError
from lightning_core.observers.monitors import HeldOut, raised

SLOW = "tests.observers.monitors.test_configuration:slow"


def slow(history: Sequence[Mapping[str, Any]], held_out: HeldOut, *, seconds: float) -> str | None:
    """A monitor with a required argument."""
    return f"slower than {seconds}"


def not_a_monitor(history: object) -> None: ...


def configure(monitors: dict[str, Any], **sections: Any) -> Any:
    return load_config({"policy": {"model": "m"}, "monitors": monitors, **sections})


def test_monitors_are_selected_and_survive_the_dump() -> None:
    settings = {"disable": ["truncation"], "stop": ["no_gradient", SLOW], "add": [SLOW], "args": {SLOW: {"seconds": 3}}}
    config = configure(settings)
    again = load_config(dict(configure(settings).model_dump(mode="json")))
    assert again.monitors == config.monitors
    assert "truncation" in dump_config(config)
    names = [one.rule.name for one in configured_monitors(config.monitors)]
    assert "truncation" not in names
    assert names[-1] == "slow"
    assert stopping_monitors(config.monitors) == {"no_gradient", "slow"}
    (alert,) = raised([{"step": 1}], {}, configured_monitors(config.monitors))
    assert str(alert) == "slow: slower than 3"


@pytest.mark.parametrize(
    ("monitors", "expected"),
    [
        ({"disable": ["truncaton"]}, r"monitors.disable\[0\]: found 'truncaton', .*did you mean 'truncation'\?"),
        ({"disable": [SLOW]}, "monitors.disable: found .*:slow', which is not one of Lightning's monitors"),
        ({"stop": ["no_gradients"]}, r"monitors.stop\[0\]: .*did you mean 'no_gradient'\?"),
        ({"stop": [SLOW]}, "monitors.stop: found .*which is not in monitors.add; add it there"),
        ({"stop": ["clipping"], "disable": ["clipping"]}, "monitors.stop: 'clipping' is in monitors.disable too"),
        ({"args": {"clipping": {"steps": 0}}}, "monitors.args.clipping.steps: found 0, expected greater than or equal"),
        ({"args": {"clipping": {"step": 2}}}, r"monitors.args.clipping.step: .*did you mean 'steps'\?"),
        ({"args": {"cliping": {}}}, r"monitors.args.cliping: .*did you mean 'clipping'\?"),
        ({"add": ["slow"]}, r"monitors.add\[0\]: found 'slow', expected 'module:callable'"),
    ],
)
def test_a_wrong_setting_is_an_error_of_the_configuration(monitors: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        configure(monitors)


@pytest.mark.parametrize(
    ("monitors", "expected"),
    [
        ({"add": [SLOW]}, "monitors: 'slow' needs the argument 'seconds'"),
        ({"add": [SLOW], "args": {SLOW: {"second": 3}}}, "monitors: 'slow' has no argument 'second'"),
        ({"add": [SLOW], "args": {SLOW: {"seconds": "3"}}}, "monitors.args.slow.seconds: found '3', expected a number"),
        ({"add": ["tests.observers.monitors.test_configuration:fast"]}, "monitors.add.0: the module .* has no 'fast'"),
        ({"add": ["tests.observers.monitors.test_configuration:not_a_monitor"]}, "cannot be one of the monitors"),
    ],
)
def test_a_wrong_function_is_an_error_when_the_run_starts(monitors: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        configured_monitors(configure(monitors).monitors)


def test_verl_cannot_be_stopped_by_a_monitor() -> None:
    with pytest.raises(ConfigError, match=r"monitors\.stop: verl trains until trainer\.steps"):
        configure({"stop": ["no_gradient"]}, trainer={"name": "verl"})
