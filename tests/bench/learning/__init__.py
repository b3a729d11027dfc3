"""Learning curves on real tasks: credit rules and other choices compared at equal model tokens, over seeds."""
