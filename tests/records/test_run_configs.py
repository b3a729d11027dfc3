"""A resumed run records the configuration that it continues with, and keeps the earlier one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lightning_core import load_config
from lightning_core.records.run_folder.configs import config_of_step, load_recorded
from lightning_core.records.run_folder.folder import open_run_folder, record_resume
from lightning_core.records.run_folder.runs import list_runs
from lightning_core.signals.air.keys import air_of
from tests.empty_checkpoint import make_empty_checkpoint


def settings(tmp_path: Path, *more: str) -> list[str]:
    return ["tasks.train=tests.bandit:tasks", "policy.model=m", f"run.dir={tmp_path}", "trainer.steps=20", *more]


def resume(tmp_path: Path, step: int, *more: str) -> Path:
    config = load_config({}, settings(tmp_path, "run.resume=true", *more))
    make_empty_checkpoint(tmp_path / "latest", step)
    folder, checkpoint = open_run_folder(config)
    assert checkpoint is not None
    record_resume(config, folder, checkpoint)
    return folder


def temperature(folder: Path, step: int) -> float:
    return load_config(config_of_step(folder, step)).rollouts.temperature


def test_each_step_has_the_configuration_that_it_was_trained_with(tmp_path: Path) -> None:
    folder, _ = open_run_folder(load_config({}, settings(tmp_path, "rollouts.temperature=0.5")))
    started = list_runs(tmp_path)[0].started
    resume(tmp_path, 4, "rollouts.temperature=0.5")
    assert [path.name for path in folder.glob("config*")] == ["config.yaml"], "nothing but run.resume differs"
    resume(tmp_path, 8, "rollouts.temperature=0.6")
    resume(tmp_path, 12, "rollouts.temperature=0.7", "trainer.steps=40")
    assert [temperature(folder, step) for step in (1, 8, 9, 12, 13, 40)] == [0.5, 0.5, 0.6, 0.6, 0.7, 0.7]
    (found,) = list_runs(tmp_path)
    assert (found.total_steps, found.started) == (40, started)
    assert not load_config(folder / "config.yaml").run.resume


def test_a_lost_or_damaged_configuration_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = open_run_folder(load_config({}, settings(tmp_path, "rollouts.temperature=0.5")))
    (folder / "config.yaml").write_text("{[")
    resume(tmp_path, 4, "rollouts.temperature=0.6")
    assert temperature(folder, 5) == 0.6
    assert (folder / "config-until-step-000004.yaml").read_text() == "{["
    (folder / "config.yaml").unlink()
    resume(tmp_path, 8, "rollouts.temperature=0.7")
    assert temperature(folder, 9) == 0.7
    assert [r.getMessage().partition(",")[0] for r in caplog.records] == [
        f"{folder / 'config.yaml'} is missing or damaged"
    ] * 2


def test_settings_that_differ_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_run_folder(load_config({}, settings(tmp_path, "rollouts.temperature=0.5")))
    resume(tmp_path, 4, "rollouts.temperature=0.6")
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.endswith("continues after step 4 with other settings: rollouts.temperature: 0.5 → 0.6")


def test_a_configuration_without_a_step_of_its_own_is_dropped(tmp_path: Path) -> None:
    folder, _ = open_run_folder(load_config({}, settings(tmp_path, "rollouts.temperature=0.5")))
    resume(tmp_path, 8, "rollouts.temperature=0.6")
    shutil.rmtree(folder / "checkpoints" / "step-000008")
    resume(tmp_path, 8, "rollouts.temperature=0.7")
    assert [temperature(folder, step) for step in (8, 9)] == [0.5, 0.7]


def test_a_run_from_before_a_key_is_read_with_what_it_did(tmp_path: Path) -> None:
    """Shaping had no gate at first. The default holds for new configurations, and for settings that are changed now."""
    folder, _ = open_run_folder(load_config({}, settings(tmp_path, "credit.air.call_cost=0.1")))
    file = folder / "config.yaml"
    air = air_of(load_recorded(file).credit)
    assert air is not None
    assert air.gate
    file.write_text(file.read_text().replace("    gate: true\n", ""))
    for more, gate in (((), False), (("credit.air.token_cost=0.1",), False), (("credit.air.gate=true",), True)):
        air = air_of(load_recorded(file, more).credit)
        assert air is not None
        assert air.gate is gate
    assert air_of(load_recorded(file, ["credit.air=null"]).credit) is None


@pytest.mark.parametrize(("last", "expected"), [("0.7", [0.5, 0.5, 0.7, 0.7]), ("0.6", [0.5, 0.5, 0.6, 0.6])])
def test_steps_that_are_taken_anew_have_the_new_configuration(tmp_path: Path, last: str, expected: list[float]) -> None:
    folder, _ = open_run_folder(load_config({}, settings(tmp_path, "rollouts.temperature=0.5")))
    resume(tmp_path, 16, "rollouts.temperature=0.55")
    resume(tmp_path, 20, "rollouts.temperature=0.6")
    for step in (16, 20):
        shutil.rmtree(folder / "checkpoints" / f"step-{step:06d}")
    resume(tmp_path, 10, f"rollouts.temperature={last}")
    assert [temperature(folder, step) for step in (5, 10, 11, 21)] == expected
