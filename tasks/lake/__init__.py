"""The lake: shards and manifests. Write, commit, read, digest."""
