"""TensorBoard's own reader finds the run in the event files."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.trackers.reported import interrupt_run, make_folder, report_run, resume_run


def read(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder / "tensorboard")).Reload()


def scalars(events: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_scalars_texts_and_the_curve_are_written(home: Path):
    folder = make_folder(home, "tensorboard")
    report_run(folder, "tensorboard")
    events = read(folder)
    assert scalars(events, "reward") == [(1, 0.25), (2, 0.5)]
    assert scalars(events, "loss") == [(2, 0.125)], "NaN is left out"
    assert scalars(events, "sql/kl") == [(1, 0.5)]
    assert scalars(events, "eval/reward") == [(0, 0.5), (2, 1.0)]
    assert scalars(events, "summary/improvement") == [(2, 0.5)]
    tags = events.Tags()
    assert "critic_loss" not in tags["scalars"]
    assert [image.step for image in events.Images("curve")] == [2]
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in tags["tensors"]}
    assert texts["tags/text_summary"] == "first try, demo"
    assert "model: tiny\n" in texts["config/text_summary"]
    assert texts["state/text_summary"] == "finished"


def test_a_resumed_run_replaces_the_steps_that_it_repeats(home: Path):
    folder = make_folder(home, "tensorboard")
    interrupt_run(folder, "tensorboard")
    assert scalars(read(folder), "reward")[-1][0] == 3
    resume_run(folder, "tensorboard")
    found = [(step, round(value, 3)) for step, value in scalars(read(folder), "reward")]
    assert found == [(1, 0.1), (2, 0.2), (3, 1.5), (4, 2.0)]
