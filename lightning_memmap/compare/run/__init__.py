"""The runs of a comparison: what is planned, started in processes, and measured there."""
