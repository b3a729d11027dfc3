"""From a provider's model to a trained one: a pipeline of commands, within a budget, and their results."""
