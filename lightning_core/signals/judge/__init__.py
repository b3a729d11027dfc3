"""A judge: a model that scores the rollouts of a group (``credit.judge``)."""
