"""The programs that take part in make bench beside the recipes: bare loops, and the peers."""
