"""The first suite: changes of the defaults are chosen with it."""
