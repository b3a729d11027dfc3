"""Hook of mkdocs: shows the repository's other documents in the site, and keeps their links valid in both places.

Pages are written for GitHub, with links relative to the file. In the site, examples/NAME/README.md is examples/NAME.md, and a link to a
file that is not in the site leads to the repository. Also writes llms.txt (https://llmstxt.org), an index of the pages as Markdown.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.append(str(Path(__file__).parents[2]))  # mkdocs imports a hook as a file of its own
from docs._generate.messages import messages_page

ROOT = Path(__file__).parents[2]
ADDED = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples/index.md",
    **{
        path.relative_to(ROOT).as_posix(): f"examples/{path.parent.name}.md"
        for path in sorted(ROOT.glob("examples/*/README.md"))
    },
}
"""Path in the repository → page of the site, for pages outside docs/."""
_BOOSTS = {
    **dict.fromkeys(("guides/", "quickstart.md", "faq.md", "troubleshooting.md"), 4.0),
    "messages.md": 0.5,
    **dict.fromkeys(("decisions/", "changelog.md", "pages.md", "benchmarks.md", "evidence.md"), 0.1),
}
"""The search's factor by the start of a page's path: guides come before records of how something was decided or measured."""
_SOURCES = {page: source for source, page in ADDED.items()}
_LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in ADDED.items():
        file = File.generated(config, page, abs_src_path=str(ROOT / source))
        file.edit_uri = f"../{source}"
        files.append(file)
    messages = File.generated(config, "messages.md", content=messages_page())
    messages.edit_uri = None
    files.append(messages)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    boost = next((boost for start, boost in _BOOSTS.items() if page.file.src_uri.startswith(start)), None)
    if boost is not None:
        page.meta["search"] = {"boost": boost}
    parts, end = list[str](), 0
    source = _SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    pages = {f"docs/{file.src_uri}": file.src_uri for file in files} | ADDED
    for block in [*_FENCED.finditer(markdown), None]:  # links in code stay
        prose = markdown[end : block.start() if block else None]
        parts += [_rewrite(prose, source, page.file.src_uri, pages, str(config.repo_url)), block[0] if block else ""]
        end = block.end() if block else end
    return "".join(parts)


def on_post_build(config: MkDocsConfig) -> None:
    text = (ROOT / "docs" / "pages.md").read_text(encoding="utf-8")
    introduction = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").split("\n\n")[1]
    contents = dict(re.findall(r"^\| \[[^\]]*\]\(([^)]*)\) \| (.*) \|$", text, re.MULTILINE))
    raw = str(config.repo_url).replace("github.com", "raw.githubusercontent.com") + "/main"
    lines = [f"# {config.site_name}", f"> {config.site_description}", introduction]
    for section in config.nav or []:
        ((title, entries),) = section.items()
        lines += [f"## {title}"] if isinstance(entries, list) else []
        for name, page in _nav_pages(entries):
            source = _SOURCES.get(page, f"docs/{page}")
            if not (ROOT / source).is_file():  # written for the site only
                continue
            described = contents.get(page) or contents.get(posixpath.relpath(source, "docs"))
            lines.append(f"- [{name}]({raw}/{source})" + (f": {described}" if described else ""))
    text = re.sub(r"(\n- .*)\n(?=\n- )", r"\1", "\n\n".join(lines))
    Path(config.site_dir, "llms.txt").write_text(f"{text}\n", encoding="utf-8")


def _nav_pages(entries: str | list[Any]) -> Iterator[tuple[str, str]]:
    """Title and page of each entry of a section; a section within it counts as its first page."""
    for entry in entries if isinstance(entries, list) else []:
        ((name, page),) = entry.items()
        yield name, page if isinstance(page, str) else next(_nav_pages(page))[1]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.watch += [str(ROOT / source) for source in ADDED]
    return config


def _rewrite(prose: str, source: str, page: str, pages: Mapping[str, str], repository: str) -> str:
    """``prose`` of the file ``source`` with links for ``page`` of the site."""

    def target(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        if path in pages:
            link = posixpath.relpath(pages[path], posixpath.dirname(page) or ".")
        elif (ROOT / path).exists():
            link = f"{repository}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}"
        else:
            return match[0]  # reported by mkdocs
        return f"{match[1]}{link}{match[3] or ''}"

    return _LINK.sub(target, prose)
