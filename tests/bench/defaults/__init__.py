"""Trains two suites of small agents with the shipped defaults, and with changes of them, at equal processor time."""
