"""Agents as their authors would write them, and the tasks that train them."""
