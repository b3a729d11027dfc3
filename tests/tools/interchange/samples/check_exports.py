"""Checks an export with the vendors' own packages: ``python check_exports.py FOLDER``.

FOLDER has ``atif.jsonl`` and ``openai.jsonl``, as ``lightning-rl traces export --as atif`` and ``--as openai`` write them.
"""

import json
import sys
from pathlib import Path
from typing import Any

from atif import Trajectory
from openai.types.chat import ChatCompletionFunctionToolParam, ChatCompletionMessageParam
from pydantic import TypeAdapter

folder = Path(sys.argv[1])
documents = [json.loads(line) for line in (folder / "atif.jsonl").read_text().splitlines()]
for document in documents:
    again: dict[str, Any] = Trajectory.model_validate(document).to_json_dict(exclude_none=True)
    assert again.keys() == document.keys(), again.keys() ^ document.keys()
    assert again["steps"] == document["steps"]
messages = TypeAdapter(list[ChatCompletionMessageParam])
tools = TypeAdapter(list[ChatCompletionFunctionToolParam])
lines = [json.loads(line) for line in (folder / "openai.jsonl").read_text().splitlines()]
for line in lines:
    for message in line["messages"]:
        message.pop("weight", None)  # of fine-tuning data alone
    messages.validate_python(line["messages"])
    tools.validate_python(line.get("tools", []))
sys.stdout.write(f"{len(documents)} trajectories and {len(lines)} conversations are valid\n")
