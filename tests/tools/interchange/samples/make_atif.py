"""A trajectory of ATIF with a tool, token ids and a sub-agent, by the package ``atif``."""

import json
import sys
from pathlib import Path

from atif import Agent, Metrics, Observation, ObservationResult, Step, SubagentTrajectoryRef, ToolCall, Trajectory
from program import TOOLS, save

folder = Path(sys.argv[1])
user = Step(step_id=1, source="user", message="What is 2 + 3?", timestamp="2026-11-27T12:00:00Z")
nested = Trajectory(
    schema_version="ATIF-v1.7",
    session_id="trial-1",
    trajectory_id="adder-1",
    agent=Agent(name="adder", version="1.0", model_name="small"),
    steps=[
        Step(step_id=1, source="user", message="2 + 3", timestamp="2026-11-27T12:00:02Z"),
        Step(step_id=2, source="agent", message="5", timestamp="2026-11-27T12:00:03Z"),
    ],
)
call = ToolCall(tool_call_id="call_1", function_name="add", arguments={"a": 2, "b": 3})
result = ObservationResult(
    source_call_id="call_1", content="5", subagent_trajectory_ref=[SubagentTrajectoryRef(trajectory_id="adder-1")]
)
trajectory = Trajectory(
    schema_version="ATIF-v1.7",
    session_id="trial-1",
    trajectory_id="trial-1",
    agent=Agent(name="calculator", version="1.0", model_name="gpt-4o-mini", tool_definitions=TOOLS),
    steps=[
        user,
        Step(
            step_id=2,
            source="agent",
            message="",
            reasoning_content="I add the numbers.",
            timestamp="2026-11-27T12:00:01Z",
            tool_calls=[call],
            observation=Observation(results=[result]),
            metrics=Metrics(
                prompt_tokens=3,
                completion_tokens=2,
                prompt_token_ids=[1, 2, 3],
                completion_token_ids=[4, 5],
                logprobs=[-0.5, -0.25],
            ),
        ),
        Step(step_id=3, source="agent", message="The sum is 5.", timestamp="2026-11-27T12:00:04Z"),
    ],
    extra={"reward": 1.0},
    subagent_trajectories=[nested],
)
save(folder / "atif.json", json.dumps(trajectory.to_json_dict(exclude_none=True)))
