"""An AutoGen agent that solves word problems with a calculator tool."""
