"""Datasets resident on every device for PyTorch Lightning."""
