"""verl as the trainer.

Its V1 trainer on Ray updates the weights; this package supplies rollouts, rows and advantages.

It uses verl's documented extension points only: an agent-loop manager (`manager`), a dataset (`dataset`), an advantage estimator and
policy losses (`plugin`). It subclasses no class of verl. Data flows one way::

    verl's trainer --tasks--> manager --jobs--> workers (Ray) --rollouts--> manager --credit--> rows --TransferQueue--> verl's trainer
                                                  |  ^
                                        tokens in v  | tokens out
                                              verl's model servers
"""
