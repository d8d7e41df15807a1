"""The only user of private names of torch, Lightning and torchmetrics."""
