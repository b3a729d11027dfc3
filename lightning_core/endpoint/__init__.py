"""The policy endpoint: serves OpenAI's and Anthropic's APIs, records every token."""
