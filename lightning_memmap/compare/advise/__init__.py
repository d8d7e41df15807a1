"""Predictions: what each strategy would need and cost on devices that one may not have."""
