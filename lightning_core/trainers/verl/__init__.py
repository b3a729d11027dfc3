"""verl as the trainer: its V1 trainer on Ray updates the weights, and we give it rollouts, rows and advantages.

Through documented doors only: an agent-loop manager (`manager`), a dataset (`dataset`), an advantage estimator and policy losses
(`plugin`). No class of verl's is subclassed but torch's Dataset. Data flows one way::

    verl's trainer --tasks--> manager --jobs--> workers (Ray) --rollouts--> manager --credit--> rows --TransferQueue--> verl's trainer
                                                  |  ^
                                        tokens in v  | tokens out
                                              verl's model servers
"""
