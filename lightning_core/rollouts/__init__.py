"""Turns tasks into rollouts and rows, with the same code for every trainer."""
