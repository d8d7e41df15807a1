"""The data module, its options, the stores of its splits, their set-up, and resuming a fit."""
