"""Where each shard is kept, and whether it fits.

topology  the data devices, how much memory shards may use, and where batches are assembled
plan      the residency of each shard, as a plan and as a table
"""
