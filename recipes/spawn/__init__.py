"""torch.multiprocessing.spawn in place of torchrun: see train.py."""
