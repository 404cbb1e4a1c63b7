"""How fast ranks talk: all-reduce, broadcast and all-gather over sizes and backends, and the share of the link."""
