"""The policy endpoint: an OpenAI-compatible server in front of a model that knows its tokens."""
