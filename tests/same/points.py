"""The data of the scripts that tests compare."""

import torch
from torch.utils.data import Dataset


class Points(Dataset):
    """Points of four classes; reading a point adds noise to it."""

    def __init__(self, count, seed, noise):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(count) % 4
        self.points = torch.randn(count, 8, generator=generator) + self.labels[:, None]
        self.noise = noise

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.points[index] + self.noise * torch.randn(8), self.labels[index]
