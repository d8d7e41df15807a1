"""Steps whose rows are scattered over replicas or micro-batches, and are one step to Lightning."""
