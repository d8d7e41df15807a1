"""Stores at a URL: read shard by shard through a local cache, pushed and pulled.

files     the files of a remote directory, and what can go wrong with them
shards    shards, fetched into local files and compared with their checksums
cache     an open store, whose shards are fetched when they are needed and kept in a directory
transfer  whole stores, to a URL and from there
"""
