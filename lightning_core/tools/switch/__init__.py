"""Answers the agents of a program from several models by share, with feedback by model: how a paid model is replaced step by step.

`SwitchServer` is a proxy in front of models: runs and models of this machine, which it serves itself, and any server. An *arm* is a model
that answers a share of an agent's conversations.
"""
