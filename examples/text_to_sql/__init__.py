"""Text to SQL with three LangGraph agents: a writer, a checker and a rewriter."""
