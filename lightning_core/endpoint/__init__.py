"""The policy endpoint: a server in the wire formats of OpenAI and Anthropic that records every token."""
