"""The command ``lightning-rl``: its parser, and `train`. The other commands have modules of their own.

Exit codes: see `exits`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_core.errors import ConfigError, InfrastructureError, LightningError
from lightning_core.records.failures import causes
from lightning_core.rollouts.log_format import DEBUG_VARIABLE, configure_logging
from lightning_core.tools import exits
from lightning_core.tools.cli import completion as cli_completion
from lightning_core.tools.cli import credit as cli_credit
from lightning_core.tools.cli import docs as cli_docs
from lightning_core.tools.cli import doctor as cli_doctor
from lightning_core.tools.cli import evaluate as cli_evaluate
from lightning_core.tools.cli import export as cli_export
from lightning_core.tools.cli import improve as cli_improve
from lightning_core.tools.cli import init as cli_init
from lightning_core.tools.cli import prompts as cli_prompts
from lightning_core.tools.cli import record as cli_record
from lightning_core.tools.cli import runs as cli_runs
from lightning_core.tools.cli import serve as cli_serve
from lightning_core.tools.cli import sft as cli_sft
from lightning_core.tools.cli import switch as cli_switch
from lightning_core.tools.cli import trace as cli_trace
from lightning_core.tools.cli import traces as cli_traces
from lightning_core.tools.cli import view as cli_view
from lightning_core.tools.cli.arguments import DEFAULT_CONFIG, check_overrides, default_config, split_sources
from lightning_core.tools.cli.border import run_command
from lightning_core.tools.cli.messages import say
from lightning_core.trainers.threads import let_threads_sleep

if TYPE_CHECKING:
    from lightning_core.config import Config
    from lightning_core.rollouts.tasks import Task


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if options.debug:
        os.environ[DEBUG_VARIABLE] = "1"
    configure_logging()
    if options.command != "record":  # whose program inherits the environment
        let_threads_sleep()  # before a command loads torch
    commands = {
        "init": cli_init.init,
        "doctor": cli_doctor.doctor,
        "train": _train,
        "sft": cli_sft.sft,
        "eval": cli_evaluate.evaluate,
        "baseline": cli_evaluate.baseline,
        "improve": cli_improve.improve,
        "prompts": cli_prompts.prompts,
        "serve": cli_serve.serve,
        "switch": cli_switch.switch,
        "record": cli_record.record,
        "export": cli_export.export,
        "trace": cli_trace.trace,
        "traces": cli_traces.traces,
        "credit": cli_credit.credit,
        "view": cli_view.view,
        "runs": cli_runs.runs,
        "docs": cli_docs.docs,
        "completion": lambda options: cli_completion.completion(options, build_parser()),
    }
    return run_command(commands[options.command], options)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands and options."""
    parser = argparse.ArgumentParser(
        prog="lightning-rl",
        description="Train the model inside an LLM agent by reinforcement learning.",
        epilog="Messages name pages of the documentation, such as docs/doctor.md: lightning-rl docs docs/doctor.md prints them.",
    )
    parser.set_defaults(folder=None)
    parser.add_argument("--version", action="version", version=metadata.version("lightning-rl"))
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    init = commands.add_parser("init", help="write an agent, tasks, a configuration and a test, to start from")
    cli_init.add_options(init)

    doctor = commands.add_parser(
        "doctor",
        help="check the environment, and an agent before it is trained",
        epilog="Exit code: 0 without problems, 1 with problems, 2 for a wrong configuration.",
    )
    cli_doctor.add_options(doctor)

    train = commands.add_parser(
        "train",
        help="train the policy, and evaluate it on held-out tasks before and after",
        epilog="Exit code: 0 if the run is complete, 1 if it failed, 2 for a wrong configuration, 3 with --require-improvement and "
        "no significant improvement, 70 for a bug, 130 if interrupted (143: by SIGTERM).",
    )
    train.add_argument(
        "config", metavar="CONFIG", nargs="?", help=f"YAML file; see docs/configuration.md (default: {DEFAULT_CONFIG})"
    )
    train.add_argument(
        "--resume", action="store_true", help="continue from the last checkpoint of run.name, or of the newest run"
    )
    train.add_argument(
        "--require-improvement",
        action="store_true",
        help="exit with 3 unless the held-out reward has improved: the 95%% interval of the difference lies above 0",
    )
    train.add_argument(
        "--print-verl-config", action="store_true", help="with trainer.name: verl: print verl's configuration and exit"
    )

    supervised = commands.add_parser(
        "sft", help="fine-tune the policy on recorded rollouts: good ones of a run, or a teacher's traces"
    )
    cli_sft.add_options(supervised)

    evaluate = commands.add_parser("eval", help="evaluate a policy on held-out tasks")
    cli_evaluate.add_eval_options(evaluate)

    baseline = commands.add_parser(
        "baseline", help="evaluate a provider's model in place of the policy: reward, tokens, latency and cost"
    )
    cli_evaluate.add_baseline_options(baseline)

    prompts = commands.add_parser(
        "prompts", help="find demonstrations and system prompts that raise the reward, without training"
    )
    cli_prompts.add_options(prompts)

    improve = commands.add_parser(
        "improve",
        help="measure, find prompts, fine-tune and train within a budget, and compare the results",
        epilog="Exit code: that of the stage that failed, else 0.",
    )
    cli_improve.add_options(improve)

    serve = commands.add_parser("serve", help="serve a trained policy, or any model, to OpenAI and Anthropic clients")
    cli_serve.add_options(serve)

    switched = commands.add_parser(
        "switch", help="show and change the shares of models that answer agents, of a running `serve PLAN.yaml`"
    )
    actions = [*cli_switch.add_options(switched)]

    recorded = commands.add_parser(
        "record",
        help="run a program unchanged, and record its model calls as traces",
        usage="%(prog)s [options] -- PROGRAM [ARGUMENT ...]",
        epilog="Exit code: that of the program, or 2 for wrong options.",
    )
    cli_record.add_options(recorded)

    export = commands.add_parser(
        "export", help="write a trained policy as a Hugging Face folder, an adapter or a GGUF file"
    )
    cli_export.add_options(export)

    show = commands.add_parser("trace", help="show rollouts as trees: a run's, stored traces, or one task run now")
    cli_trace.add_options(show)

    interchange = commands.add_parser("traces", help="import traces of other systems, export rollouts to their formats")
    conversions = cli_traces.add_options(interchange)

    credit = commands.add_parser("credit", help="recompute credit on a run's stored rollouts, and show what changes")
    cli_credit.add_options(credit)

    view = commands.add_parser("view", help="show runs in a browser")
    cli_view.add_options(view)

    listed = commands.add_parser("runs", help="list the runs in a folder, compare runs, remove runs")
    actions += cli_runs.add_options(listed)

    pages = commands.add_parser("docs", help="list, print and search the pages of the documentation")
    cli_docs.add_options(pages)

    completion = commands.add_parser("completion", help="print the completion script of a shell")
    cli_completion.add_options(completion)

    for command in (*commands.choices.values(), *actions, *conversions):
        if command not in (listed, switched, interchange):
            command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    for command in (doctor, train, supervised, evaluate, baseline, prompts, improve, serve, export, show, credit):
        command.add_argument(
            "overrides", metavar="key=value", nargs="*", default=(), help="settings that override the file's"
        )
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed arguments. Exits with a usage error for unknown arguments."""
    parser = build_parser()
    # Overrides may come before or after options; argparse returns the later ones separately.
    options, rest = parser.parse_known_args(cli_runs.with_action(arguments))
    if not hasattr(options, "overrides"):
        if rest:
            parser.error(f"unexpected argument {rest[0]!r} for {options.command!r}")
        return options
    options.overrides = [*options.overrides, *rest]
    if options.command in ("doctor", "train"):
        _find_config(options)
    if options.command == "sft":
        split_sources(parser, options)
    check_overrides(parser, options)
    return options


def _find_config(options: argparse.Namespace) -> None:
    """Set ``config``, which argparse confuses with an override if it is left out or comes after an option."""
    words = [*filter(None, [options.config]), *options.overrides]
    named = next((word for word in words if not word.startswith("-") and _is_config(word)), None)
    if named is not None:
        words.remove(named)
    options.config, options.overrides = named, words


def _is_config(word: str) -> bool:
    return "=" not in word or Path(word).is_file()


def _train(options: argparse.Namespace) -> int:
    from lightning_core.config import load_config

    options.config = options.config or default_config()
    overrides = [*options.overrides, *(["run.resume=true"] if options.resume else [])]
    config = load_config(options.config, overrides, needs=("agent", "tasks.train"))
    if config.eval.every and config.tasks.eval is None:
        raise ConfigError(f"eval.every is {config.eval.every}, but tasks.eval is not set; set it, or remove eval.every")
    if options.require_improvement and config.tasks.eval is None:
        raise ConfigError("--require-improvement needs held-out tasks, but tasks.eval is not set")
    held_out = _enough_tasks(config) if options.require_improvement else None
    if options.print_verl_config:
        return _print_verl_config(config)
    from lightning_core.loop import fit
    from lightning_core.observers.progress import show_progress
    from lightning_core.records.store import Store
    from lightning_core.tools.cli.console import show
    from lightning_core.tools.cli.ledger import format_ledger
    from lightning_core.tools.cli.summary import make_summary

    began, progress = time.time(), show_progress()
    try:
        result = fit(config=config, eval_tasks=held_out, progress=progress)
    except BaseException as error:
        with suppress(OSError):  # after SIGHUP, the terminal may be gone
            progress.close()
        runs = Path(config.run.dir)
        # Not `latest` itself, which the next run replaces.
        folder = runs / (config.run.name or (runs / "latest").resolve().name)
        if _is_of_this_run(folder, since=began):
            options.folder = folder
            error.add_note(_how_to_resume(error, folder, options))
            if not isinstance(error, KeyboardInterrupt):
                _show_ledger(folder)
        raise
    progress.close()
    with Store(result.folder / "store.db", read_only=True) as store:
        show("", make_summary(result.summary), "", format_ledger(store.ledger()))
    say(f"\nrun: {result.folder}\ncheckpoint: {result.checkpoint}")
    shown = result.summary.improved or not options.require_improvement
    return exits.OK if shown else exits.NOT_IMPROVED


def _enough_tasks(config: Config) -> Sequence[Task]:
    """The held-out tasks. Raises `ConfigError` if there are too few for an interval, and so for a significant improvement."""
    from lightning_core.records.statistics.intervals import MIN_TASKS
    from lightning_core.rollouts.tasks import held_out_tasks

    tasks = held_out_tasks(config)
    if len(tasks) < MIN_TASKS:
        key = "tasks.eval has" if config.eval.tasks is None or config.eval.tasks > len(tasks) else "eval.tasks selects"
        raise ConfigError(
            f"--require-improvement needs {MIN_TASKS} held-out tasks or more, but {key} {len(tasks)}: with fewer, no improvement is "
            "significant, and the command would always exit with 3. Add held-out tasks, or leave the option out"
        )
    return tasks


def _is_of_this_run(folder: Path, *, since: float) -> bool:
    """Whether the run that failed has recorded anything in ``folder``; otherwise the newest run is a different one."""
    store = folder / "store.db"
    return store.is_file() and max(path.stat().st_mtime for path in folder.glob("store.db*")) >= since


def _show_ledger(folder: Path) -> None:
    from lightning_core.records.store import Store
    from lightning_core.tools.cli.console import show
    from lightning_core.tools.cli.ledger import format_ledger

    with suppress(LightningError, OSError), Store(folder / "store.db", read_only=True) as store:
        show(format_ledger(store.ledger()), "")


def _print_verl_config(config: Config) -> int:
    from lightning_core.trainers.verl.train import show_verl_config

    print(show_verl_config(config, Path(config.run.dir) / (config.run.name or "RUN")), end="")
    return exits.OK


def _how_to_resume(error: BaseException, folder: Path, options: argparse.Namespace) -> str:
    from lightning_core.records.run_folder.checkpoints import checkpoints

    resumable = checkpoints(folder)
    kept = [text for text in options.overrides if not text.startswith(("run.name=", "run.resume="))]
    words = [options.config, *kept, f"run.name={folder.name}", "--resume"]
    saved = f"The last checkpoint is {resumable[-1]}" if resumable else "No checkpoint was written yet"
    first = next(causes(error))
    if not isinstance(first, Exception):
        how = "to continue"
    elif isinstance(first, InfrastructureError):
        how = "when the cause has passed or is removed, continue with"
    else:  # an error of the configuration, the agent or the machine would recur
        how = "after the correction, continue with"
    return f"{saved}; {how}: lightning-rl train {shlex.join(words)}"


if __name__ == "__main__":
    sys.exit(main())
