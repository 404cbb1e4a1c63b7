"""Data for jobs that only have to be training: `--data tests.slow_data:images`. They sleep most of the time."""

import time

import torch


class SlowImages(torch.utils.data.Dataset):
    """Images and classes; each takes 2 ms without the processor: a step of 64 images on two ranks 64 ms."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(0)
        self.images = torch.rand(count, 1, 8, 8, generator=generator)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        time.sleep(0.002)
        return self.images[i], torch.tensor(i % 10)


def images():
    return {"train": SlowImages(128), "test": SlowImages(20), "target": "class", "num_classes": 10}
