"""The comparison of runs."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from lightning_core.errors import ConfigError, RecordError
from lightning_core.records.run_folder.configs import config_differences, show_value
from lightning_core.records.run_folder.runs import RunInfo
from lightning_core.tools.runs.compare import HeldOutDifference, held_out_difference
from lightning_core.tools.view.charts import compared_charts
from lightning_core.tools.view.library import Library
from lightning_core.tools.view.live import charts_data
from lightning_core.tools.view.render import page
from lightning_core.tools.view.snapshot import read_curves


def show(request: Request) -> Response:
    """``/compare?run=A&run=B…``: the others are compared with the first one. Synchronous, since it reads files."""
    library: Library = request.app.state.library
    names = list(dict.fromkeys(request.query_params.getlist("run")))
    runs = [library.run(name) for name in names]
    differences = config_differences({run.name: run.config for run in runs})
    return page(
        request,
        "compare.html",
        runs=runs,
        charts=charts_data(compared_charts({run.name: read_curves(run) for run in runs})),
        differences=[
            (
                difference.key,
                [show_value(difference.values[run.name]) if run.name in difference.values else None for run in runs],
            )
            for difference in differences
            # A missing section differs from one without values in form only.
            if any(value is not None for value in difference.values.values())
        ],
        held_out=[(run, *_held_out(runs[0], run)) for run in runs[1:]],
    )


def _held_out(first: RunInfo, second: RunInfo) -> tuple[HeldOutDifference | None, str]:
    """The comparison of the last evaluations, or the reason there is none."""
    try:
        held = held_out_difference(first.folder, second.folder)
    except (ConfigError, OSError, RecordError) as error:
        return None, str(error)
    return held, "" if held else "no task was evaluated in both runs"
