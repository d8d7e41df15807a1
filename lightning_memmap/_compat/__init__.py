"""The only user of names that torch, Lightning and torchmetrics keep to themselves."""
