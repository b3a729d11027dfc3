"""A LangChain agent that answers customers' questions from a shop's catalogue."""
