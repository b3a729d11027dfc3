"""The policy endpoint: serves OpenAI's, Anthropic's and Google's APIs, records every token."""
