"""Data for jobs that only have to be training: `--data tests.slow_data:images`. They sleep most of the time.

Use `--workers 0`: by default a rank has workers, which import torch too.

If SLOW_UNTIL names a file, they sleep only until it exists: a job that a test no longer needs then ends quickly.
"""

import os
import time

import torch


class SlowImages(torch.utils.data.Dataset):
    """Images and classes; reading each one sleeps for `seconds`."""

    def __init__(self, count, seconds):
        self.seconds = seconds
        generator = torch.Generator().manual_seed(0)
        self.images = torch.rand(count, 1, 8, 8, generator=generator)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        if not os.path.exists(os.environ.get("SLOW_UNTIL", "")):
            time.sleep(self.seconds)
        return self.images[i], torch.tensor(i % 10)


def of(seconds):
    splits = {"train": SlowImages(128, seconds), "test": SlowImages(20, seconds)}
    return {**splits, "target": "class", "num_classes": 10}


def images():
    """A step of 64 images takes two ranks 64 ms."""
    return of(0.002)


def slower_images():
    """Ten times as long."""
    return of(0.02)
