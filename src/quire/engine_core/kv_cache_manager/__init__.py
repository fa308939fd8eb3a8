"""KV CACHE MANAGER: block pool, block tables, prefix cache, copy-on-write, and how many blocks there are."""
