"""A text-to-SQL program of three agents in LangGraph: a writer, a checker and a rewriter over SQLite databases."""
