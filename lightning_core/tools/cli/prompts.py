"""``lightning-rl prompts``: find demonstrations and system prompts that raise the reward of an agent."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_core.errors import ConfigError, plural
from lightning_core.tools import exits
from lightning_core.tools.cli.messages import say
from lightning_core.tools.cli.numbers import whole
from lightning_core.tools.prompts import BUDGET, DEMONSTRATIONS, SETS

if TYPE_CHECKING:
    from lightning_core.prompts.file import PromptFile
    from lightning_core.records.statistics.intervals import Comparison
    from lightning_core.tools.prompts.find import FoundPrompts


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file; see docs/configuration.md")
    parser.add_argument(
        "--demonstrations",
        metavar="K",
        type=whole(0),
        help=f"demonstrations of each agent, from its own solved rollouts (default: {DEMONSTRATIONS}, with --gepa 0)",
    )
    parser.add_argument(
        "--sets",
        metavar="N",
        type=whole(1),
        default=SETS,
        help="sets of demonstrations to compare (default: %(default)s)",
    )
    parser.add_argument("--gepa", action="store_true", help="search system prompts with GEPA; needs the extra gepa")
    parser.add_argument("--reflection", metavar="MODEL", help="with --gepa: the model that proposes system prompts")
    parser.add_argument(
        "--reflection-url",
        metavar="URL",
        help="its OpenAI-compatible base URL (default: policy.upstream, or else $OPENAI_BASE_URL with $OPENAI_API_KEY)",
    )
    parser.add_argument(
        "--reflection-key-env", metavar="NAME", help="with --reflection-url: the environment variable with its API key"
    )
    parser.add_argument(
        "--budget",
        metavar="ROLLOUTS",
        type=whole(1),
        default=BUDGET,
        help="most rollouts of training tasks (default: %(default)s); two evaluations on the held-out tasks come on top",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", default="prompts.yaml", help="the file to write (default: %(default)s)"
    )


def prompts(options: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    from lightning_core.config import dump_config, load_config
    from lightning_core.observers.progress import show_progress
    from lightning_core.prompts.file import prompt_file_text
    from lightning_core.records.atomic import write_atomically
    from lightning_core.records.report import Summary
    from lightning_core.records.run_folder.folder import create_folder
    from lightning_core.records.run_folder.remove import removed_if_unused
    from lightning_core.records.store import Store
    from lightning_core.tools.prompts.find import add_version, find_prompts
    from lightning_core.tools.prompts.reflection import open_reflection

    config = load_config(options.config, options.overrides, needs=("agent", "tasks.train", "tasks.eval"))
    output = Path(options.output)
    file = _earlier(output)
    number = options.demonstrations if options.demonstrations is not None else 0 if options.gepa else DEMONSTRATIONS
    if options.gepa != (options.reflection is not None):
        raise ConfigError("--gepa and --reflection MODEL go together: the model proposes the system prompts")
    if not options.gepa and (options.reflection_url or options.reflection_key_env):
        raise ConfigError("--reflection-url and --reflection-key-env are for --gepa. Remove them, or pass --gepa")
    if not options.gepa and not number:
        raise ConfigError("nothing to search: pass --demonstrations K above 0, or --gepa")
    reflection = None
    if options.gepa:
        reflection = open_reflection(config, options.reflection, options.reflection_url, options.reflection_key_env)
    folder = Path(config.run.dir) / time.strftime("prompts-%Y%m%d-%H%M%S")
    create_folder(folder, dump_config(config))
    options.folder = folder
    began, progress = time.monotonic(), show_progress()
    try:
        with removed_if_unused(folder):
            found = find_prompts(
                config=config,
                folder=folder,
                demonstrations=number,
                sets=options.sets,
                reflection=reflection,
                budget=options.budget,
                progress=progress,
            )
    finally:
        progress.close()
    with Store(folder / "store.db", read_only=True) as store:
        tokens = store.tokens_sampled()
    Summary(
        eval=found.held_out,
        steps=0,
        rollouts=found.rollouts,
        tokens_sampled=tokens,
        tokens_trained=0,
        wall_seconds=time.monotonic() - began,
        seed=config.run.seed,
    ).write(folder / "summary.json")
    _show(found)
    if found.is_better:
        model = config.eval.model or config.policy.model
        file = add_version(file, found, model=model, run=folder)
        write_atomically(output, prompt_file_text(file))
        say(f"wrote {output}, version {file.current}; to use it, set prompts: {output} in the configuration")
    say(f"recorded in {folder}")
    return exits.OK


def _earlier(path: Path) -> PromptFile:
    """The versions in the file at ``path``, to which one is added; none if there is no file."""
    from lightning_core.prompts.file import PLAIN, PromptFile, read_prompt_file

    if not path.exists():
        return PromptFile(current=None)
    try:
        file = read_prompt_file(path)
    except ValueError as error:
        raise ConfigError(f"--output names {str(path)!r}, {error}") from None
    if file.current == PLAIN:
        raise ConfigError(
            f"--output: {str(path)!r} has no versions: it was not written by this command, which would replace it; choose another name"
        )
    return file


def _show(found: FoundPrompts) -> None:
    for line in found.methods:
        say(line)
    left_out = f", {found.left_out} left out" if found.left_out else ""
    held_out_left_out = f", {plural(found.held_out_left_out, 'rollout')} left out" if found.held_out_left_out else ""
    if refused := found.refused + found.held_out_refused:
        of_held_out = f", {found.held_out_refused} of them of held-out tasks," if found.held_out_refused else ""
        say(
            f"{plural(refused, 'rollout')}{of_held_out} had a refused request and counted as 0: with long demonstrations the context "
            "may be full; raise policy.max_context, or lower --demonstrations"
        )
    reflections = f", {plural(found.reflections, 'reflection')}" if found.reflections else ""
    say(f"{plural(found.rollouts, 'rollout')} of training tasks{left_out}{reflections}")
    if found.held_out is None:
        say(
            f"no prompt has a higher mean reward than the present one on {plural(found.validation.tasks, 'validation task')} "
            f"({found.validation.eval_reward_before:.3f}); nothing is written"
        )
        return
    say(f"validation  {_line(found.validation)} (these tasks chose the prompts)")
    say(f"held out    {_line(found.held_out)}{held_out_left_out}")
    if not found.held_out.improved:
        say("Not significant on the held-out tasks: the 95% interval of the difference includes 0.")


def _line(c: Comparison) -> str:
    from lightning_core.records.statistics.intervals import format_mean

    before = format_mean(c.eval_reward_before, c.eval_ci95_before)
    after = format_mean(c.eval_reward_after, c.eval_ci95_after)
    gain = format_mean(c.improvement, c.improvement_ci95, sign="+")
    return f"{before} → {after}: {gain} on {plural(c.tasks, 'task')}"
