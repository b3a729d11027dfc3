"""From tasks to rollouts to rows. The same code for every trainer."""
