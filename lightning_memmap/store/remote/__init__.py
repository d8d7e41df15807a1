"""Stores at a URL: read shard by shard through a local cache, pushed and pulled.

files     the files of a remote directory, and what can go wrong with them
shards    shards, fetched into local files and compared with their checksums
cache     the directory in which fetched shards are kept, and how much of them
store     an open store whose shards are fetched when they are needed
transfer  whole stores, to a URL and from there
"""
