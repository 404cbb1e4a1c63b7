"""Self-contained recipes for training PyTorch models on more than one device."""
