"""Bases of several strategies, and what they share."""
