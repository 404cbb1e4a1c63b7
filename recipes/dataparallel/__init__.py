"""nn.DataParallel: see train.py."""
