"""The algorithm as pure functions: advantages (numpy, for the controller) and losses (torch, for the learner).

Nothing is imported here, so that the controller can use advantages without loading torch.
"""
