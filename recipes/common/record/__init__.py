"""What rank 0 writes to runs/NAME and shows on the terminal."""
