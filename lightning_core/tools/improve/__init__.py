"""From a provider's model to a trained one: the commands of that road one after another, within a budget, and their results."""
