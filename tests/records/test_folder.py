"""The folder of a run that was killed while it was created."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_core.errors import ConfigError
from lightning_core.records.run_folder.folder import create_folder


def test_a_folder_without_anything_in_place_is_created_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".config.yaml-7.new").write_text("half of")
    create_folder(folder, "whole\n")
    assert (folder / "config.yaml").read_text() == "whole\n"
    with pytest.raises(ConfigError, match="exists"):
        create_folder(folder, "another\n")
