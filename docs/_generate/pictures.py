"""Makes the pictures of the viewer in docs/images, and the terminal output on two pages, from real runs.

Run ``python -m docs._generate.pictures FOLDER`` with the packages of ``make test-view``. The runs are kept in FOLDER, and made only if they
are not there: the calculator's and a short one of a tutorial with ``smollm2-135m-instruct``, and ``lightning-rl improve`` with a tiny
model.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

from lightning_core.records.store import Store
from lightning_core.tools.view.server import open_view
from tests.browser.conftest import ARGUMENTS, CHROMIUM
from tests.paid_model.app import quality
from tests.paid_model.project import APP, ROOT, Shell, paid_model, write_project, write_switch
from tests.repository.test_tutorials import PAGES, code, write_files

DOCS = Path(__file__).parents[1]
LARGEST = 150_000
"""Bytes of a picture."""
WIDTH = 1100
_OUTPUT = re.compile(r"(<!-- generated: pictures (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_SHORT = ("trainer.steps=2", "rollouts.tasks_per_step=2", "tasks.eval=null")
"""For a run of which only rollouts are shown."""


def main(folder: Path) -> None:
    """Make the runs in ``folder``, then the pictures and the terminal output."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = folder / "runs"
    langgraph = next(page for page in PAGES if page.stem == "langgraph")
    train(runs / "calculator", ROOT, "examples/calculator/lightning.yaml")
    train(runs / langgraph.stem, tutorial(langgraph, folder), "lightning.yaml", *_SHORT)
    project = folder / "paid-model"
    improvement, outputs = improve(project)
    with browsing(runs) as (page, url):
        take(page, f"{url}/runs/calculator", "viewer-run", folder=project, height=980)
        found = f"{url}/runs/langgraph/rollouts/{rollout(runs / 'langgraph', 'calls = 2')}"
        take(page, found, "tutorial-langgraph", folder=project, color="logprob", height=1250)
        found = f"{url}/runs/calculator/rollouts/{rollout(runs / 'calculator', 'step = 3')}"
        take(page, found, "viewer-rollout", folder=project, color="advantage", height=1400)
    with browsing(improvement) as (page, url):
        take(page, f"{url}/improve/{improvement.name}", "viewer-improve", folder=project)
    for name in ("guides/replace-a-paid-model.md", "switching.md"):
        path = DOCS / name
        text = path.read_text(encoding="utf-8")
        path.write_text(
            _OUTPUT.sub(lambda m: f"{m[1]}\n```text\n{outputs[m[2]]}\n```\n\n{m[3]}", text), encoding="utf-8"
        )


def tutorial(page: Path, folder: Path) -> Path:
    """The folder with the files of the tutorial ``page``."""
    project = folder / page.stem
    if not project.is_dir():
        project.mkdir()
        write_files(page, project)
        (project / "lightning.yaml").write_text(code(page, "yaml")[0], encoding="utf-8")
        subprocess.run([sys.executable, "make_tasks.py"], cwd=project, check=True)
    return project


def train(run: Path, project: Path, *words: str) -> None:
    """Train the run in ``run`` if it is not there."""
    if not (run / "summary.json").is_file():
        command = [sys.executable, "-m", "lightning_core.tools.cli", "train", *words]
        paths = os.pathsep.join((str(ROOT), str(ROOT / "integrations")))
        settings = [f"run.dir={run.parent.resolve()}", f"run.name={run.name}"]
        subprocess.run([*command, *settings], cwd=project, env={**os.environ, "PYTHONPATH": paths}, check=True)


def improve(folder: Path) -> tuple[Path, dict[str, str]]:
    """The folder of ``lightning-rl improve``, and the output of the commands after it: ``compare`` and ``switch``."""
    folder.mkdir(exist_ok=True)
    with paid_model() as provider:
        shell = Shell(folder, provider)
        if not list(folder.glob("runs/improve-*")):
            write_project(folder, provider)
            shell.run("record", "--to", "traces", "-c", "c.yaml", "--", sys.executable, str(APP), "40")
            words = (
                "improve",
                "c.yaml",
                "--model",
                "gpt-4o-mini",
                "--traces",
                "traces",
                "trainer.steps=12",
                "eval.samples=2",
            )
            shell.run(*words)
        (improvement,) = folder.glob("runs/improve-*")
        stages = [*improvement.glob("baseline-*"), *sorted(improvement.glob("eval-*"))]
        names = [str(stage.relative_to(folder)) for stage in stages]
        compared = shell.run("runs", "compare", *names, "--prices", "prices.yaml", COLUMNS="100")
        trained = next(path for path in (improvement / "trained", improvement / "warm") if path.is_dir())
        write_switch(folder, trained, provider)
        shutil.rmtree(folder / "switch", ignore_errors=True)
        with shell.serving("switch.yaml") as url:
            for text, response in shell.app(24, PROVIDER_URL=url):
                httpx.post(f"{url}/feedback", json={"response": response, "reward": quality(text)}).raise_for_status()
        shown = shell.run("switch", "show", "switch", "--prices", "prices.yaml", COLUMNS="100")
    table = re.search(r"^last held-out evaluation.*?(?=\n\n)", compared, re.DOTALL | re.MULTILINE)
    assert table is not None, compared
    return improvement, {"compare": table[0], "switch": shown.strip()}


@contextmanager
def browsing(runs: Path) -> Generator[tuple[Page, str]]:
    """A page of a viewer of ``runs``, and the start of its URLs."""
    with open_view(runs) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
        page.goto(url)
        yield page, "/".join(url.split("/")[:3])
        browser.close()


def take(page: Page, url: str, name: str, *, folder: Path, height: int | None = None, color: str | None = None) -> None:
    """Write the picture ``name`` of the page at ``url``; ``height``: pixels from the top, None: all."""
    page.goto(url)
    if color is not None:
        page.get_by_role("radio", name=color).check()
    expect(page.locator("[aria-busy=true]")).to_have_count(0)
    page.wait_for_timeout(500)  # charts and tokens are drawn after the page
    # The folder's path on this machine is of no interest.
    page.evaluate(
        "prefix => document.querySelectorAll('code').forEach(c => (c.textContent = c.textContent.replaceAll(prefix, '')))",
        f"{folder.resolve()}/",
    )
    path = DOCS / "images" / f"{name}.png"
    page.set_viewport_size({"width": WIDTH, "height": height or page.evaluate("document.body.scrollHeight")})
    page.wait_for_timeout(300)
    page.screenshot(path=path)
    with Image.open(path) as image:
        image.convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE).save(path, optimize=True)
    if (size := path.stat().st_size) > LARGEST:
        raise SystemExit(f"{path} has {size:,} bytes; expected at most {LARGEST:,}: show less of the page")


def rollout(run: Path, condition: str) -> int:
    """The number of a training rollout of which others in its group earned another reward; the worst of the first group."""
    with Store(run / "store.db", read_only=True) as store:
        group = "SELECT 1 FROM rollouts AS o WHERE o.task_id = r.task_id AND o.step = r.step AND o.reward > r.reward"
        rows = store.select(
            f"SELECT ordinal FROM rollouts AS r WHERE phase = 'train' AND {condition} AND EXISTS ({group}) "
            "ORDER BY step DESC, ordinal LIMIT 1"
        )
    return next(iter(rows))["ordinal"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
