"""Information gain: how much more likely each call makes the task's answer (``credit.information_gain``)."""
