"""Replicas of a module in one process: their tensors, attributes, threads and optimizers."""
