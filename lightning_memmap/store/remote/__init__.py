"""Stores at a URL: read shard by shard through a local cache, pushed and pulled.

files     the files of a remote directory, and their errors
shards    shards, fetched into local files and compared with their checksums
cache     an open store, whose shards are fetched when they are needed and kept in a directory
transfer  push a store to a URL, or pull it from one
"""
