"""A loop with LiteLLM, with the model that the first argument names."""

import json
import sys
from pathlib import Path

import litellm

PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
READ = {"type": "function", "function": {"name": "read_note", "description": "Read a file.", "parameters": PATH}}

model, *questions = sys.argv[1:]
messages = []
for question in questions:
    messages.append({"role": "user", "content": question})
    for _ in range(5):
        message = litellm.completion(model, messages, tools=[READ]).choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            result = Path(json.loads(call.function.arguments)["path"]).read_text()
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            break
    print(messages[-1]["content"])
