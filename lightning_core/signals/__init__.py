"""Sources of training signal besides the rewards of rollouts, one folder each.

A folder has `section.py`, the signal's keys in the configuration, and `signal.py`, what it does in a step (`rollouts.signal`). Its
rules for credit, if any, are in `rules.py`. The core imports none of these modules by name: it reads `credit.signal_names`.
"""
