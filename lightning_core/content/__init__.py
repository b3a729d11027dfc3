"""The messages and the token ids of a rollout, each kept once; spans and the index of its conversations refer to them."""
