"""Describes the loss of one of verl's processes, which Ray reports with a traceback."""

from __future__ import annotations

import re

_CLASS = re.compile(r"class_name: (\w+)")
_ROLES = {
    "TaskRunner": "verl's trainer and Lightning's manager",
    "WorkerDict": "a training worker",
    "HttpServer": "a model server",
    "RolloutWorker": "a rollout worker",
    "TransferQueue": "TransferQueue",
    "SimpleStorageUnit": "TransferQueue",
}
"""By a part of the class of its actor."""
_NODE = re.compile(r"its node (?:has )?died|node has crashed|LocalRayletDied|NodeDied|local raylet died")
_ACTOR = re.compile(r"actor (?:died|is dead|experienced)|ActorDied|ActorUnavailable|WorkerCrashed")


def lost_process(text: str) -> str | None:
    """The process that was lost, as a sentence, if ``text`` of an error of Ray's is about one."""
    if not (_ACTOR.search(text) or _NODE.search(text)):
        return None
    classes = _CLASS.findall(text)
    role = next((role for part, role in _ROLES.items() if classes and part in classes[-1]), None)
    if _NODE.search(text):
        what = "a node of the Ray cluster was lost" + (f", with the process of {role}" if role else "")
    else:
        what = f"the process of {role or 'an actor' + (f' {classes[-1]}' if classes else '')} was lost"
    return f"{what}: killed, out of memory, or its machine is gone"
