"""An AutoGen agent that solves word problems with a calculator, one tool call at a time."""
