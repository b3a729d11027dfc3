"""MLflow's client finds the run in its database."""

from __future__ import annotations

from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Run

from tests.trackers.reported import FILES, interrupt_run, make_folder, report_run, resume_run


def find(client: MlflowClient) -> Run:
    experiment = client.get_experiment_by_name("lightning-rl")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    return run


def history(client: MlflowClient, run: Run, key: str) -> list[tuple[int, float]]:
    return sorted((m.step, m.value) for m in client.get_metric_history(run.info.run_id, key))


def test_metrics_parameters_tags_and_artifacts_are_stored(home: Path):
    report_run(make_folder(home, "mlflow"), "mlflow")
    client = MlflowClient()
    run = find(client)
    assert (run.info.run_name, run.info.status) == ("a-mlflow", "FINISHED")
    assert history(client, run, "reward") == [(1, 0.25), (2, 0.5)]
    assert history(client, run, "loss") == [(2, 0.125)], "NaN is left out"
    assert history(client, run, "sql/kl") == [(1, 0.5)]
    assert history(client, run, "eval/reward") == [(0, 0.5), (2, 1.0)]
    assert run.data.metrics["summary/improvement"] == 0.5
    assert run.data.params["policy.model"] == "tiny"
    assert {"first try", "demo"} <= run.data.tags.keys()
    assert FILES | {"step-000002"} == {entry.path for entry in client.list_artifacts(run.info.run_id)}
    checkpoint = {entry.path for entry in client.list_artifacts(run.info.run_id, "step-000002")}
    assert checkpoint == {"step-000002/adapter", "step-000002/weights.safetensors"}


def test_a_resumed_run_continues_the_same_run(home: Path):
    folder = make_folder(home, "mlflow")
    interrupt_run(folder, "mlflow")
    client = MlflowClient()
    assert find(client).info.status == "KILLED"
    resume_run(folder, "mlflow")
    run = find(client)
    assert run.info.status == "FINISHED"
    steps = [step for step, _ in history(client, run, "reward")]
    assert steps == [1, 2, 3, 3, 4], "MLflow keeps both values of a step that is repeated"
