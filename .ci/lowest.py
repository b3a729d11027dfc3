"""Prints pip constraints with the lowest versions that the extras of the integrations admit, and all else as in constraints.txt.

Packages that are released together with a framework (langgraph-prebuilt with langgraph) are left to pip, which takes what fits.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
FAMILIES = ("autogen", "langchain", "langgraph", "openai-agents")


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra in project["entry-points"]["lightning_core.integrations"]:
        for requirement in project["optional-dependencies"][extra]:
            if pin := re.match(r"([A-Za-z0-9._-]+)>=([0-9][^,;]*)", requirement):
                print(f"{pin[1]}=={pin[2]}")
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith(("#", *FAMILIES)):
            print(line)


if __name__ == "__main__":
    main()
