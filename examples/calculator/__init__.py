"""A LangGraph agent that solves word problems with a calculator in two turns."""
