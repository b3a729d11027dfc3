"""The syntaxes of tool calls, one module for each kind: pure functions that read and write text."""
