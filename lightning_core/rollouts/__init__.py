"""Tasks to rollouts to rows, once, for every trainer."""
