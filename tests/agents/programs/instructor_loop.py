"""A loop with Instructor: each response of the model is a step of the type `Step`."""

import sys
from pathlib import Path

import instructor
from pydantic import BaseModel


class Step(BaseModel):
    """Read a file, or say the answer."""

    read_note: str = ""
    answer: str = ""


client = instructor.from_provider("openai/gpt-5-mini")
messages = []
for question in sys.argv[1:]:
    messages.append({"role": "user", "content": question})
    for _ in range(5):
        step, completion = client.chat.completions.create_with_completion(messages=messages, response_model=Step)
        message = completion.choices[0].message
        result = Path(step.read_note).read_text() if step.read_note else "done"
        tool = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": result}
        messages += [message.model_dump(exclude_unset=True), tool]
        if step.answer:
            break
    print(step.answer)
