"""Lightning for langchain."""
