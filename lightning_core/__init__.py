"""Lightning: train the model inside anybody's LLM agent by reinforcement learning. (docstring being written)"""
