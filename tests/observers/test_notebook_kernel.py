"""`fit` in a real notebook: a kernel of IPython runs the cells, and the outputs are those that a page would show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from tests.tiny_model import make_tiny_model

pytest.importorskip("torch")

SETUP = """
from lightning_core import fit, load_config
from tests import bandit

config = load_config({{
    "policy": {{"model": {model!r}}},
    "rollouts": {{"tasks_per_step": 2, "group_size": 2, "max_tokens": 6}},
    "trainer": {{"steps": 2}},
    "run": {{"dir": {runs!r}}},
}})
"""


def run_cells(*cells: str) -> list[list[Any]]:
    """The outputs of each of ``cells``."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    nbclient.NotebookClient(notebook, timeout=240).execute()
    return [cell.outputs for cell in notebook.cells]


@pytest.mark.long
def test_fit_shows_progress_and_its_result_in_a_notebook(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    _, shown, silent = run_cells(
        SETUP.format(model=str(model), runs=str(tmp_path / "runs")),
        "fit(bandit.solve, config=config, tasks=bandit.tasks(), eval_tasks=bandit.held_out())",
        "result = fit(bandit.solve, config=config, tasks=bandit.tasks(), progress=False)",
    )
    html = [str(output["data"].get("text/html", "")) for output in shown if "data" in output]
    assert any("step 2/2" in text and "held-out reward after 0 steps" in text for text in html), shown
    assert any("<table>" in text and "2 steps, 8 rollouts" in text for text in html), shown
    assert not [output for output in silent if "step 2/2" in str(output)]


def test_control_characters_of_messages_are_escaped_in_a_notebook() -> None:
    (shown,) = run_cells(
        r"from lightning_core.observers.notebook import NotebookProgress; NotebookProgress().message('<a\x1b[2J\u202e\nb>')",
    )
    (html,) = [output["data"]["text/html"] for output in shown if "data" in output]
    assert html == r"<pre>&lt;a\x1b[2J\u202e\nb&gt;" + "\nstarting</pre>"
