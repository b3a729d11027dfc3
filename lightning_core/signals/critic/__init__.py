"""A critic, which predicts returns for reward rules such as ``gae`` (``credit.critic``)."""
