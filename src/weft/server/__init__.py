"""The parameter server: weights and the optimizer's state in processes of their own, shared by workers."""
