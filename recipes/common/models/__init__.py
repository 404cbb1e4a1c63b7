"""Models fitted to the data, and batch norm whose groups do not depend on the number of processes."""
