"""`anyep demo`: a Mixture-of-Experts layer over several ranks, checked against one process; its traffic.

`command` has the options. In normal mode a layer is trained: `train`, its reference and `train_results`. In
low-latency mode a layer decodes: `decode`, `decode_reference` and `decode_results`. `job` is what the command
and its ranks tell each other, without torch.
"""
