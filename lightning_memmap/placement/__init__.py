"""The placement of shards on devices and in host memory, and whether they fit.

topology  the data devices, how much memory shards may use, and where batches are assembled
shard_sizes  the bytes of each shard
plan      the residency of each shard, as a plan and as a table
"""
