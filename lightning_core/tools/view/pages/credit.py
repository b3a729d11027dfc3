"""The credit of a run's rollouts under other rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from lightning_core.config import Config
from lightning_core.config.build_rules import policy_rules
from lightning_core.errors import ConfigError, describe
from lightning_core.records.run_folder.configs import config_of_step, load_recorded
from lightning_core.records.store import Store
from lightning_core.tools.runs.recredit import compare_agents, credited_steps, most_changed, recredit
from lightning_core.tools.view.library import Library
from lightning_core.tools.view.render import page
from lightning_core.tools.view.scatter import SIZE, make_scatter
from lightning_core.tools.view.whatif import GROUP, changed_config, choose_policy, make_form
from lightning_core.tools.view.why import user_functions

_MOST_CHANGED = 25
_ALL = "all"


def show(request: Request) -> Response:
    """``/runs/NAME/credit``: the advantages of a step, or of all steps, with the rules of the URL's query."""
    library: Library = request.app.state.library
    name = request.path_params["name"]
    query = {key: value for key, value in request.query_params.items() if key != GROUP}
    groups = request.query_params.getlist(GROUP) or None
    folder = library.run(name).folder
    values: dict[str, Any] = {"name": name, "given": query, "size": SIZE, "form": None, "found": None, "problem": None}
    with library.store(name) as store:
        values["import_link"] = f"?{urlencode([*request.query_params.multi_items(), ('import', 'yes')])}"
        values["steps"] = steps = credited_steps(store)
        try:
            chosen = _steps(query.get("step"), steps)
            files = {step: config_of_step(folder, step) for step in chosen}
            file = files[chosen[-1]] if chosen else folder / "config.yaml"
            config = load_recorded(file)
            policy = choose_policy(config, query)
            values["form"] = make_form(config, policy, query, groups)
            changed = {
                path: changed_config(path, load_recorded(path), policy, query, groups)
                for path in dict.fromkeys([file, *files.values()])
            }
            imported = dict.fromkeys(function for rules in changed.values() for function in user_functions(rules))
            values["imports"] = imports = [] if query.get("import") == "yes" else list(imported)
            if not imports and chosen:
                values["found"] = _results(store, {step: changed[path] for step, path in files.items()})
        except ConfigError as error:
            values["problem"] = str(error)
    return page(request, "credit.html", status=400 if values["problem"] else 200, **{"imports": [], **values})


def _steps(text: str | None, steps: Sequence[int]) -> Sequence[int]:
    """The steps to compare: the newest one by default."""
    if not text:
        return steps[-1:]
    if text == _ALL:
        return steps
    if not text.isdecimal() or int(text) not in steps:
        known = f"{steps[0]} to {steps[-1]}" if steps else "none"
        raise ConfigError(f"step: found {text!r}, expected {_ALL!r} or one of the steps with credit: {known}")
    return [int(text)]


def _results(store: Store, configs: Mapping[int, Config]) -> Mapping[str, Any]:
    """The changes of all calls in the steps of ``configs``. Raises `ConfigError` if the rules cannot be computed."""
    for own in (own for config in configs.values() for own in policy_rules(config).values()):
        if own.needs_values:
            raise ConfigError(
                f"rewards: {own.reward_rule.name!r} needs a critic's values, which are available in training only; choose another rule"
            )
    try:
        changes = [change for step, config in configs.items() for change in recredit(store, step, config)]
    except Exception as error:
        raise ConfigError(f"the rules failed: {describe(error)}") from error
    return {
        "calls": len(changes),
        "steps": list(configs),
        "agents": compare_agents(changes),
        "changed": most_changed(changes, _MOST_CHANGED),
        "scatter": make_scatter(changes),
    }
