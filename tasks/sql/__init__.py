"""A lake as SQL: views over committed shards, and audits of them."""
