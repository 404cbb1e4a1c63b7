"""How fast ranks talk: all-reduce, broadcast and all-gather over sizes and backends, held against the link."""
