"""A LangChain agent that answers questions from a shop's catalogue."""
