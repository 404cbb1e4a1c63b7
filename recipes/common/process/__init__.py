"""A recipe's process: which rank it is, whose child it is, the signals it gets, how it ends."""
