"""Batch norm over groups: what a layer computes, the mean that it keeps, and what is refused."""

import copy

import pytest
import torch
from torch import nn

from recipes.common.data.splits import Data, MemorySplit
from recipes.common.errors import UserError
from recipes.common.models.batchnorm import (
    average_statistics,
    check_groups,
    check_parts,
    group_batch_norm,
    sync_batch_norm,
    warning,
)
from recipes.common.options import Options, check_batch
from recipes.common.world.peers import Peers
from recipes.dataparallel import train as dataparallel
from recipes.horovod import train as horovod
from recipes.pipeline.grid import PipelineOptions
from tests.conftest import refused

ARGS = Options(global_batch_size=24, batchnorm_group=4)


def make_layer(momentum=0.1):
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(3, momentum=momentum).double()
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    return layer


def images(step=0):
    return torch.randn(24, 3, 2, 2, dtype=torch.double, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_each_group_has_its_own_statistics_and_a_step_keeps_their_mean(momentum):
    layer, steps = make_layer(momentum), 3
    expected = copy.deepcopy(layer)
    group_batch_norm(layer, ARGS, 24)
    for step in range(steps):
        groups = images(step).split(4)
        alone = [copy.deepcopy(expected) for _ in groups]
        output = torch.cat([one(group) for one, group in zip(alone, groups, strict=True)])
        torch.testing.assert_close(layer(images(step)), output, rtol=1e-12, atol=1e-12)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            mean = torch.stack([getattr(one, name).double() for one in alone]).mean(dim=0)
            getattr(expected, name).copy_(mean)
    torch.testing.assert_close(layer.state_dict(), expected.state_dict(), rtol=1e-12, atol=1e-12)
    assert layer.num_batches_tracked == steps


LAYOUTS = {"two passes": [[8, 16]], "two ranks": [[4, 4], [4, 12]], "three ranks": [[4], [8], [4, 8]]}
"""For each case, the numbers of samples in each rank's passes, in the order of the batch."""


def average(layers):
    """Average the layers' statistics as average_statistics() does on several ranks."""
    parts = []
    for layer in layers:
        average_statistics(layer, ARGS, lambda tensor: parts.append(tensor.clone()))
    for layer in layers:
        average_statistics(layer, ARGS, lambda tensor: tensor.copy_(sum(parts)))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_ranks_and_passes_change_nothing(layout, momentum):
    whole = make_layer(momentum)
    layers = [copy.deepcopy(whole) for _ in layout]
    group_batch_norm(whole, ARGS, 24)
    for layer, passes in zip(layers, layout, strict=True):
        group_batch_norm(layer, ARGS, sum(passes))
    owners = [(layer, size) for layer, passes in zip(layers, layout, strict=True) for size in passes]
    for step in range(5):
        parts = images(step).split([size for _, size in owners])
        output = torch.cat([layer(part) for (layer, _), part in zip(owners, parts, strict=True)])
        expected = whole(images(step))
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
        (output.square() * images(9)).sum().backward()
        (expected.square() * images(9)).sum().backward()
        if step == 2:
            average(layers)  # and then they continue
    average(layers)
    average(layers)  # changes nothing
    for layer in layers:
        torch.testing.assert_close(layer.state_dict(), whole.state_dict(), rtol=1e-12, atol=1e-12)
        assert torch.equal(layer.eval()(images()), layers[0].eval()(images()))
    for name in ("weight", "bias"):
        gradient = sum(getattr(layer, name).grad for layer in layers)
        torch.testing.assert_close(gradient, getattr(whole, name).grad, rtol=1e-12, atol=1e-12)


def test_the_mean_of_equal_statistics_is_the_same_to_the_last_bit():
    layers = [make_layer().float() for _ in range(3)]
    for layer, size in zip(layers, (4, 8, 12), strict=True):
        layer.running_mean.copy_(images(1).flatten()[:3])
        group_batch_norm(layer, ARGS, size)
    before = copy.deepcopy(layers[0].state_dict())
    average(layers)
    assert all(torch.equal(value, before[name]) for name, value in layers[0].state_dict().items())


def test_layers_change_in_place():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm3d(3)), nn.LayerNorm(3))
    before = list(model.modules()), list(model.parameters())
    group_batch_norm(model, Options(), 24)
    assert isinstance(model[0], nn.BatchNorm1d)
    group_batch_norm(model, ARGS, 24)
    assert list(model.modules()) == before[0]
    assert all(one is other for one, other in zip(model.parameters(), before[1], strict=True))
    assert [type(module).__name__ for module in model.modules()][1::2] == ["GroupBatchNorm", "GroupBatchNorm"]


def test_a_model_without_batch_norm_has_nothing_to_group():
    check_groups(nn.BatchNorm2d(3), ARGS)
    check_groups(nn.LayerNorm(3), Options())
    with pytest.raises(UserError, match=r"^--batchnorm-group 4: --model lenet has no batch norm; drop it$"):
        check_groups(nn.LayerNorm(3), ARGS)


class Activated(nn.BatchNorm2d):
    """Batch norm and an activation in one layer, as timm's BatchNormAct2d."""

    def forward(self, images):
        return super().forward(images).relu()


def test_a_layer_that_does_more_than_batch_norm_is_refused():
    """Groups or a synchronised layer in its place would drop the activation."""
    reason = "0 is a Activated, whose forward() is not that of torch's batch norm; use torch's, with what follows"
    with refused(f"--batchnorm-group 4: {reason}"):
        check_groups(nn.Sequential(Activated(3)), ARGS)
    with refused(f"--sync-batchnorm: {reason}"):
        sync_batch_norm(nn.Sequential(Activated(3)), Peers(torch.device("cuda")))
    layer = nn.BatchNorm2d(3)
    layer.forward = Activated(3).forward
    with refused("--batchnorm-group 4: the model is a BatchNorm2d"):
        check_groups(layer, ARGS)


def test_one_line_says_that_losses_depend_on_the_number_of_processes():
    plain, grouped = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    group_batch_norm(grouped, ARGS, 24)
    assert "each of 3 parts" in warning(plain, ARGS, 3)
    assert "with --batchnorm-group 8 " in warning(plain, ARGS, 3)
    assert "; recipes/README.md says how" in warning(plain, ARGS, 5)
    assert "; recipes/README.md says how" in warning(plain, ARGS, ARGS.global_batch_size), "1 is no group"
    own = warning(nn.Sequential(plain, Activated(3)), ARGS, 3)
    assert own.endswith("; 1 is a Activated, and --batchnorm-group takes only torch's batch norm")
    for case in ((plain, ARGS, 1), (grouped, ARGS, 3), (nn.LayerNorm(3), ARGS, 3)):
        assert warning(*case) == ""


def test_one_sample_is_refused_only_where_a_channel_has_one_value():
    model, batch = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2)), ARGS.global_batch_size
    labels = torch.zeros(2, dtype=torch.int64)
    splits = {side: MemorySplit(torch.zeros(2, 1, side, side), labels) for side in (2, 3, 4)}
    images = {side: Data.of_images(split, split, 1, side, 2) for side, split in splits.items()}
    check_parts(model, ARGS, batch, images[4])
    assert model[1].num_batches_tracked == 0, "the model is as before"
    for device in ("cpu", "meta"):
        with pytest.raises(UserError, match=rf"needs two; give at least {2 * batch}$"):
            check_parts(copy.deepcopy(model).to(device), ARGS, batch, images[3])
    with pytest.raises(RuntimeError):
        check_parts(model, ARGS, batch, images[2])
    check_parts(model, ARGS, batch // 2, images[3])
    check_parts(model[:1], ARGS, batch, images[3])


@pytest.mark.parametrize("read", [torch.Tensor.item, torch.Tensor.numpy])
def test_code_that_reads_numbers_is_not_tried_on_one_sample_without_weights(read):
    """The meta device has none: fsdp checks the shards instead, later."""
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 3), torch.nn.BatchNorm2d(1)).to("meta")
    model.register_forward_pre_hook(lambda model, inputs: read(inputs[0].mean()) and None)
    split = MemorySplit(torch.zeros(2, 1, 3, 3), torch.zeros(2, dtype=torch.int64))
    check_parts(model, ARGS, ARGS.global_batch_size, Data.of_images(split, split, 1, 3, 2))


SMALL = "--global-batch-size {} is too small for {} processes x {} accumulation steps x a group of {}; use"
REFUSED = {
    (24, 5, 1, 1): "--global-batch-size 24 does not divide into groups of --batchnorm-group 5; use 20 or 25",
    (24, 4, 4, 2): f"{SMALL.format(24, 4, 2, 4)} at least 32 or --batchnorm-group 3",
    (26, 13, 9, 1): f"{SMALL.format(26, 9, 1, 13)} at least 117 or --batchnorm-group 2",
    (24, 24, 24, 1): f"{SMALL.format(24, 24, 1, 24)} at least 576",
}
"""For each case: global batch size, group size, processes and passes."""


@pytest.mark.parametrize(("case", "message"), REFUSED.items())
def test_shares_without_a_whole_group_are_refused_with_sizes_that_work(case, message):
    batch, group, world_size, passes = case
    args = Options(global_batch_size=batch, batchnorm_group=group, accumulate_steps=passes)
    with pytest.raises(UserError) as caught:
        check_batch(args, world_size, 1000)
    assert str(caught.value) == message
    for enough in (1, 4, 5, 6):
        check_batch(ARGS, enough, 1000)


def test_microbatches_without_a_whole_group_are_refused_with_sizes_that_work():
    args = PipelineOptions(global_batch_size=60, batchnorm_group=8, num_microbatches=2)
    with pytest.raises(UserError) as caught:
        args.check_microbatches(replicas=1, num_train=1000)
    parts = "1 replicas x 1 passes x 2 microbatches x groups of 8"
    assert str(caught.value) == f"--global-batch-size 60 does not divide into {parts}; use 48 or 64"


@pytest.mark.parametrize("option", [{"batchnorm_group": 4}, {"sync_batchnorm": True}])
def test_replicas_of_dataparallel_are_refused(option):
    cpu = torch.device("cpu")
    with pytest.raises(UserError, match=r"use RECIPE=ddp$"):
        dataparallel.wrap(nn.BatchNorm2d(3), Options(**option), [cpu, cpu])


def test_horovod_refuses_torchs_layer_for_all_ranks():
    """It would exchange over torch.distributed, which this recipe does not start."""
    with refused("--sync-batchnorm: torch's does not use Horovod; use --batchnorm-group, or RECIPE=ddp"):
        horovod.wrap(nn.BatchNorm2d(3), horovod.HorovodOptions(sync_batchnorm=True), Peers(torch.device("cpu")))


def test_statistics_of_all_ranks_on_cpus_are_refused_with_what_to_use():
    """One rank alone, too: torch's layer takes no tensor of a CPU."""
    peers = Peers(torch.device("cpu"))
    for peers.world_size in (1, 2):
        with pytest.raises(UserError, match=r"use --batchnorm-group, which exchanges nothing$"):
            sync_batch_norm(nn.BatchNorm2d(3), peers)
    on_gpu = sync_batch_norm(nn.BatchNorm2d(3), Peers(torch.device("cuda")))
    assert isinstance(on_gpu, nn.SyncBatchNorm)
