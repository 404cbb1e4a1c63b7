"""apex.parallel: a DistributedDataParallel that averages each gradient as backward makes it."""

import torch.distributed as dist
from apex import EVENTS
from torch import nn


class DistributedDataParallel(nn.Module):
    def __init__(self, module, delay_allreduce):
        super().__init__()
        EVENTS.append("DistributedDataParallel")
        self.module = module
        self.is_enabled = True
        for parameter in module.parameters():
            dist.broadcast(parameter.data, src=0)
            parameter.register_post_accumulate_grad_hook(self.average)

    def average(self, parameter):
        if self.is_enabled:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    def disable_allreduce(self):
        EVENTS.append("disable_allreduce")
        self.is_enabled = False

    def enable_allreduce(self):
        self.is_enabled = True

    def forward(self, images):
        return self.module(images)
