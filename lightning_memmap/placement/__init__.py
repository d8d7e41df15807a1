"""Placement: where each shard lives, and whether it fits.

topology  the data devices, how much memory shards may take, where batches are assembled
plan      which shard lives where, decided and as a table
"""
