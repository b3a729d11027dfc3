"""The notebooks run from their first cell to their last, in a kernel of IPython.

Three things differ from what a reader does: the install cell is left out, a tiny model replaces the demo model, and it takes two steps.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from tests.tiny_model import make_tiny_model

pytest.importorskip("torch")

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"


def notebooks() -> list[Path]:
    return sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert not [cell.source for cell in cells if cell.outputs or cell.execution_count is not None]


@pytest.mark.slow
def test_the_quickstart_trains_plots_and_shows_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    settings = {
        '"smollm2-135m-instruct", "train_layers": 15': repr(str(make_tiny_model(tmp_path / "model"))),
        '"tasks_per_step": 8, "group_size": 8': '"tasks_per_step": 2, "group_size": 2',
        '"steps": 6': '"steps": 2',
        '"every": 2, "tasks": 50': '"every": 1, "tasks": 8',
    }
    cells = run(FOLDER / "quickstart.ipynb", tmp_path, settings)
    assert "reward: 1.0" in shown(cells, "playground")
    trained = shown(cells, "fit(solve")
    assert "step 2/2" in trained
    assert "2 steps, 8 rollouts" in trained
    assert "image/png" in shown(cells, "plt.errorbar")
    assert "finder" in next(shown([cell], "trace") for cell in cells if cell.source == "trace")
    assert "sampled tokens: [" in shown(cells, "output_ids")


def run(path: Path, folder: Path, settings: dict[str, str]) -> list[Any]:
    """The cells of the notebook at ``path`` after it ran in ``folder``, with each of ``settings`` replaced."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if "install" not in cell.metadata.get("tags", ())]
    for old, new in settings.items():
        (cell,) = [cell for cell in notebook.cells if old in cell.source]
        cell.source = cell.source.replace(old, new)
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook.cells


def shown(cells: list[Any], source: str) -> str:
    """The outputs of the last cell with ``source`` in its code."""
    return str([cell.outputs for cell in cells if cell.cell_type == "code" and source in cell.source][-1])
