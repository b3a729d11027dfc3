"""mini-swe-agent as its command `mini` runs it, without a person who confirms."""

import sys

from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

config = get_config_from_spec("mini.yaml")
settings = {key: config["agent"][key] for key in ("system_template", "instance_template")}
model = LitellmModel(model_name="openai/gpt-5-mini", cost_tracking="ignore_errors", **config["model"])
agent = DefaultAgent(model, LocalEnvironment(**config["environment"]), step_limit=5, **settings)
print(agent.run(sys.argv[1])["submission"])
