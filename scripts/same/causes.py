"""The causes that can be named, each with its fix and the line of PyTorch's documentation that explains it."""

from __future__ import annotations

from dataclasses import dataclass

DDP = "torch.nn.parallel.DistributedDataParallel"
SAMPLER = "torch.utils.data.DistributedSampler"


@dataclass(frozen=True)
class Cause:
    """A reason why training differs, or may differ."""

    summary: str
    fix: str
    doc: str = ""
    """An object, also below https://docs.pytorch.org/docs/stable/generated/, and a quote of its documentation."""


@dataclass(frozen=True)
class Finding:
    """Something that differs: a key of CAUSES or NOTES, and the step and quantity where it was first seen."""

    cause: str
    what: str
    step: int | None = None
    """The step, from 0, of a gradient whose difference is not explained yet."""


CAUSES = {
    "loss-scaled": Cause(
        "the gradient is scaled by the number of processes",
        "divide by it exactly once: DDP averages over ranks, all_reduce sums",
        f"{DDP}: “if the loss is summed (NOT averaged as usual) across instances in a batch”",
    ),
    "learning-rate-scaled": Cause(
        "the learning rate depends on the number of processes, but the global batch does not",
        "scale the rate by the global batch, once, or not at all; step a scheduler once a step, not once per "
        "process, as accelerate's prepare() does",
        f"{DDP}: “using the same learning rate for equivalent batch size”",
    ),
    "unequal-learning-rates": Cause(
        "ranks step with different learning rates",
        "compute the rate from values that all ranks share; a scheduler that reads a metric needs its mean",
        f"{DDP}: “assumes that they will be modified by the optimizer in all processes in the same way”",
    ),
    "no-set-epoch": Cause(
        "the sampler draws the same order in every epoch",
        "call sampler.set_epoch(epoch) before each epoch's loop over the loader",
        f"{SAMPLER}: “Otherwise, the same ordering will be always used.”",
    ),
    "not-sharded": Cause(
        "ranks draw the same samples",
        "pass DataLoader a DistributedSampler, its seed equal on all ranks, in place of shuffle=True; shuffle a "
        "stream alike on all ranks, and give each its part, as by split_dataset_by_node() of datasets",
        f"{SAMPLER}: “load a subset of the original dataset that is exclusive to it”",
    ),
    "batch-not-divided": Cause(
        "a step has another number of samples than at one process",
        "give DataLoader the batch of one process, {local_batch} samples, which is GLOBAL_BATCH / processes",
    ),
    "dropped-samples": Cause(
        "some samples of the data set are never drawn",
        "shuffle with set_epoch, so that the tail differs by epoch, or keep it (drop_last=False)",
        f"{SAMPLER}: “the sampler will drop the tail of the data”",
    ),
    "padded-evaluation": Cause(
        "the evaluation counts some samples twice: the sampler pads ranks to equal lengths",
        "give rank r the samples range(r, len(dataset), world_size); sum losses and counts, then divide",
        f"{SAMPLER}: “the sampler will add extra indices”",
    ),
    "one-rank-evaluation": Cause(
        "the evaluation is that of one rank's share of the data",
        "sum losses and counts over ranks by dist.all_reduce, then divide",
        "torch.distributed.all_reduce: “Reduces the tensor data across all machines”",
    ),
    "mean-of-means": Cause(
        "ranks average over unequal numbers of samples or targets, and each average has the same weight",
        "sum over samples or targets, all_reduce sums and counts, then divide; DDP divides by the world size, too",
        f"{DDP}: “(NOT averaged as usual)”",
    ),
    "contrastive": Cause(
        "the loss compares a sample only with the others of its rank, which are fewer with more processes",
        "compare with those of all ranks: torch.distributed.nn.functional.all_gather() keeps their gradients",
        "torch.distributed.nn.functional.all_gather: “Gathers tensors from the whole group”",
    ),
    "batch-dependent": Cause(
        "the loss of a batch is not the mean over its samples: one process was run on each rank's samples, and "
        "the mean of its gradients is the ranks' gradient",
        "all_reduce what it takes from the rank's whole batch, such as a count of boxes by which it is divided, "
        "or the load of experts; gather samples that it compares by torch.distributed.nn.functional.all_gather()",
    ),
    "gathered-without-gradient": Cause(
        "the loss is computed from what all_gather() returns, which carries no gradient to the other ranks",
        "gather by torch.distributed.nn.functional.all_gather(), which does",
        "torch.distributed.nn.functional.all_gather: “Gathers tensors from the whole group”",
    ),
    "not-synchronised": Cause(
        "ranks step with different gradients: no exchange, one after the step, or one whose result is not used",
        "wrap the model in DistributedDataParallel, or all_reduce and divide parameter.grad itself before step()",
        f"{DDP}: “The module performs an all-reduce step on gradients”",
    ),
    "no-sync-always": Cause(
        "no_sync() covers the last backward pass before step(), so that its gradient is not exchanged",
        "leave no_sync() for the last micro-batch of each step",
        f"{DDP}.no_sync: “will later be synchronized in the first forward-backward pass exiting the context”",
    ),
    "around-ddp": Cause(
        "the model is called around its DistributedDataParallel wrapper, so that gradients are not exchanged",
        "call the wrapper: ddp(x), not model(x) or ddp.module(x)",
        f"{DDP}: “Constructor, forward method, and differentiation of the output (or a function "
        "of the output of this module) are distributed synchronization points.”",
    ),
    "no-broadcast": Cause(
        "ranks begin with different weights",
        "seed all ranks alike before the model is built, or broadcast rank 0's weights; DDP's constructor does",
        "torch.distributed.broadcast: “Broadcasts the tensor to the whole group.”",
    ),
    "same-augmentation": Cause(
        "all ranks draw the same random numbers for their samples",
        "seed by rank once the model is built: torch.manual_seed(seed + rank), and random and numpy alike",
        "torch.manual_seed: “Sets the seed for generating random numbers on all devices.”",
    ),
    "batch-norm": Cause(
        "batch norm normalises by the statistics of each rank's share of the batch",
        "convert the model by nn.SyncBatchNorm.convert_sync_batchnorm, or use group or layer norm",
        "torch.nn.SyncBatchNorm: “to convert :attr:`BatchNorm*D` layer to :class:`SyncBatchNorm`”",
    ),
    "unused-parameters": Cause(
        "some parameters receive no gradient",
        "drop them from the model, or pass find_unused_parameters=True to DistributedDataParallel",
        f"{DDP}: “Parameters that don't receive gradients as part of this graph are preemptively marked”",
    ),
    "data-repeated": Cause(
        "the resumed run draws samples again that it had trained on",
        "save the position in the epoch with the checkpoint, and skip the batches up to it",
    ),
    "other-data-after-resume": Cause(
        "the resumed run draws other samples than the run that was not stopped",
        "save the epoch with the checkpoint, and pass it to set_epoch()",
        f"{SAMPLER}: “Otherwise, the same ordering will be always used.”",
    ),
    "learning-rate-not-resumed": Cause(
        "the resumed run begins with another learning rate",
        "save and load the state of the learning rate scheduler",
        "torch.optim.Optimizer.load_state_dict: “calling it beforehand will overwrite the loaded learning rates”",
    ),
    "optimizer-not-resumed": Cause(
        "the resumed run makes another step: the optimizer's state is not that of the checkpoint",
        "save and load optimizer.state_dict()",
        "torch.optim.Optimizer.state_dict: “a Dict holding current optimization state”",
    ),
    "starts-over": Cause(
        "the resumed run begins again at the first step",
        "save a checkpoint before the stop, and load it from {run_dir}; {resume} is auto then",
    ),
    "weights-not-resumed": Cause(
        "the resumed run begins with weights that the run has at no step, or not on all ranks",
        "load the model's state_dict on all ranks before it is wrapped",
    ),
    "steps-not-resumed": Cause(
        "the resumed run does not end at the step at which it would have ended without a stop",
        "save the step or epoch with the checkpoint, and count on from it",
    ),
    "buffers-not-resumed": Cause(
        "the resumed run trains the same, and evaluates otherwise: what no optimizer has is not restored",
        "save and load model.state_dict(), which has the buffers (batch norm's), and averages of weights",
    ),
    "failed": Cause("the script fails", "see its whole output: make run SCRIPT=... NPROC_PER_NODE=... ARGS=..."),
    "hung": Cause(
        "the script does not end: ranks wait for each other",
        "call every collective on all ranks, in the same order, as often",
        f"{DDP}: “Take that into account in case different processes might be executing different code.”",
    ),
    "other-samples": Cause(
        "the ranks' samples together are not those of one process",
        "shard one order of the samples, the same on all ranks; or use a DataLoader and a map-style data "
        "set (not an IterableDataset): its batches can be replayed",
    ),
    "other-steps": Cause(
        "the number of optimizer steps differs",
        "divide the samples of an epoch over the ranks; count steps, not batches of one rank",
    ),
    "printed-loss-scaled": Cause(
        "the printed value is scaled by the number of processes; the gradients are right",
        "sum it by all_reduce, and divide once: a mean by the number of processes, a sum by that of all samples",
        "torch.distributed.all_reduce: “Reduces the tensor data across all machines”",
    ),
    "unknown": Cause(
        "none of the known causes fits",
        "compare what enters the quantity named above at 1 process and at more, such as a count of the rank's own "
        "targets or boxes by which a loss is divided, or statistics or pairs of the samples of the rank's batch",
    ),
    "many-steps": Cause(
        "the steps before it are the same; over so many, rounding errors alone may grow to this",
        "run 10 to 50 steps: if they are the same, so is the training",
    ),
}

NOTES = {
    "one-rank-loss": Cause(
        "the gradients are right; the printed value is of other samples, such as one rank's share of the batch",
        "sum it and the number of samples over ranks, then divide, before it is printed",
    ),
    "same-dropout": Cause(
        "dropout draws the same masks on all ranks",
        "seed by rank once the model is built",
    ),
    "other-order": Cause(
        "one process draws the samples in another order, or ranks draw some twice to have equally many",
        "no fix is needed: one process was run again with the batches of these ranks",
    ),
    "other-batch": Cause(
        "a step has another number of samples than at one process",
        "unless that is meant, give each process its part of the batch: GLOBAL_BATCH=48, {local_batch} in ARGS",
    ),
    "scaled-with-batch": Cause(
        "the learning rate and the batch depend on the number of processes, so later steps are not compared",
        "compare at one batch: GLOBAL_BATCH=48, {local_batch} in ARGS",
    ),
    "redundant": Cause(
        "every process trains on the whole batch; the work is not divided",
        "start one process, or shard the data",
    ),
    "uncontrolled": Cause(
        "the script draws random numbers that cannot be repeated, so gradients are not compared",
        "draw them in the data set's __getitem__ from the global generators",
    ),
    "not-replayed": Cause(
        "one process draws the samples of a stream in another order, so gradients are not compared",
        "use a DataLoader and a map-style data set (not an IterableDataset): its batches can be replayed",
    ),
    "chaotic": Cause(
        "rounding alone changes the gradient so much that a bug might not show from this step on",
        "use fewer steps, or a lower learning rate",
    ),
    "not-printed": Cause(
        "the script prints no loss that can be read, so only its steps are compared, not losses",
        "print `loss 2.3` in a line, or give LOSS='(regular expression)'",
    ),
    "generators-not-resumed": Cause(
        "the resumed run's steps draw other random numbers, so that its samples, updates and evaluation are not "
        "compared",
        "save and load the states of each rank's generators: torch.get_rng_state(), and random's and numpy's",
    ),
    "zero-gradient": Cause(
        "the gradient is zero in every step, so that nothing is trained or compared",
        "look at the loss: cross_entropy() of a single class, for example, is 0 whatever the output",
    ),
    "not-replicated": Cause(
        "ranks hold different parts of the model, or no optimizer of torch: only learning rates, samples and "
        "printed values are compared",
        "no fix is needed",
    ),
}
"""What is worth knowing although training is correct."""
