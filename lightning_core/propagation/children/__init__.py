"""Rollouts in child processes: Python workers get the scope, programs get an environment with the endpoint's URL and a signed key."""
