"""Lightning for langgraph."""
