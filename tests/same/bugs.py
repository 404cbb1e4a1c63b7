"""Bugs to plant in right.py: each is a few replacements of text that stands in it once."""

from __future__ import annotations

from pathlib import Path

RIGHT = Path(__file__).with_name("right.py")
RESUME = ("--resume", "auto")

LOSS = "(ddp(points), labels) /"
SUM_OF_RANK = "(ddp(points), labels.where(points[:, 0] > 0, -100), reduction='sum') / sum(points[:, 0] > 0) /"
WRAPPED = "ddp = DistributedDataParallel(model)\n"
EXTRA = f"model.extra = nn.Parameter(torch.zeros(3))\n{WRAPPED[:-1]} if world_size > 1 else model\n"
CONTRAST = "points[:, :4].T, torch.arange(len(points)))"
DISTRIBUTED = "import torch.distributed as dist\n"
GATHER = f"""{DISTRIBUTED}
def gather(rows):
    parts = [torch.zeros_like(rows) for _ in range(world_size)]
    dist.all_gather(parts, rows)
    parts[rank] = rows
    return torch.cat(parts)

"""
CONTRAST_OF_ALL = "gather(ddp(points)) @ gather(points[:, :4]).T, torch.arange(len(points) * world_size))"
STEP = "            optimizer.step()\n"
BY_HAND = """            for weight in model.parameters():
                dist.all_reduce(weight.grad)
                weight.grad /= world_size
"""
SUM_BY_HAND = BY_HAND.replace("/= world_size", "/= 1")
SUM_OF_CLONES = SUM_BY_HAND.replace("weight.grad)", "weight.grad.clone())")
UNWRAPPED = {WRAPPED: "ddp = model\n"}
EXCHANGED = {**UNWRAPPED, STEP: BY_HAND + STEP}
ACCUMULATE = {'"--accumulate", type=int, default=1': '"--accumulate", type=int, default=2'}
SEED, SEED_BY_RANK = "torch.manual_seed(0)\n", "torch.manual_seed(100 + rank)\n"
RATE = "lr=0.1,"
SAMPLER = "sampler = DistributedSampler(train)\n"
NO_EPOCH = {"    sampler.set_epoch(epoch)\n": ""}
OWN_SAMPLER = """class Own(DistributedSampler):
    def __iter__(self):
        return iter(torch.randperm(48, generator=torch.Generator().manual_seed(self.epoch))[rank::world_size])


sampler = Own(train)
"""
DROPPING = "DistributedSampler(train, shuffle=False, drop_last=True)"
LOADER = "loader = DataLoader(train, args.batch_size // args.accumulate, sampler=sampler)\n"
STREAM = """class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        order = torch.randperm(48, generator=torch.Generator().manual_seed(epoch)).tolist()
        return iter([train[index] for index in order[rank::world_size]])


train.noise = 0.0
loader = DataLoader(Stream(), args.batch_size // args.accumulate)
"""
WORKERS = {"sampler=sampler)": "sampler=sampler, num_workers=1)"}
SHARES = """shares = [b.tensor_split(world_size)[rank].tolist() for b in torch.arange(51).split(12)]
loader = DataLoader(train, batch_sampler=shares)
"""
SHARE = "        points, labels = test.points[rank::world_size], test.labels[rank::world_size]\n"
PADDED = """        indices = list(DistributedSampler(test, shuffle=False))
        points, labels = test.points[indices], test.labels[indices]
"""
MEANS = "        total[0], total[1] = total[0] / total[1], 1\n"
REDUCE = "    dist.all_reduce(total)\n"
LOAD = '    model.load_state_dict(state["model"])\n'
LOAD_SCHEDULER = '    scheduler.load_state_dict(state["scheduler"])\n'
LOAD_OPTIMIZER = '    optimizer.load_state_dict(state["optimizer"])\n'
LOAD_RATE = "    optimizer.param_groups[0]['lr'] = state['optimizer']['param_groups'][0]['lr']\n"
SGD = "optimizer = torch.optim.SGD("
EXCHANGING = """class Exchanging(torch.optim.SGD):
    def step(self):
        for weight in model.parameters():
            weight.grad = weight.grad / world_size
            dist.all_reduce(weight.grad)
        super().step()


optimizer = Exchanging("""

PLAIN = {"Points(48, 1, 0.1)": "[*zip(Points(48, 1, 0).points, torch.arange(48) % 4)]"}  # its samples draw nothing

BUGS = {
    "loss-scaled": {"loss divided by the world size": {LOSS: f"{LOSS} world_size /"},
        "loss multiplied by it": {LOSS: LOSS.replace("/", "* world_size /")},
        "gradients summed, not averaged": {**UNWRAPPED, STEP: SUM_BY_HAND + STEP},
        "gradients summed in the optimizer's step": {**UNWRAPPED, SGD: EXCHANGING.replace(" / world_size", "")}},
    "no-set-epoch": {"no set_epoch": NO_EPOCH,
        "no set_epoch of an own sampler": {**NO_EPOCH, SAMPLER: OWN_SAMPLER}},
    "padded-evaluation": {"padded evaluation": {SHARE: PADDED}},
    "one-rank-evaluation": {"evaluation of one rank": {REDUCE: ""}},
    "mean-of-means": {"evaluation by the mean of means": {REDUCE: MEANS + REDUCE},
        "mean of unequal shares": {"Points(48,": "Points(51,", LOADER: SHARES},
        "mean over the targets of a rank": {LOSS: LOSS.replace("labels", "labels.where(points[:, 0] > -1, -100)")},
        "sum divided by the rank's targets": {LOSS: SUM_OF_RANK},
        "mean by class weights": {LOSS: LOSS.replace("labels", "labels, torch.arange(1.0, 5.0)")}},
    "contrastive": {"contrast within a rank": {LOSS: f"(ddp(points) @ {CONTRAST} /"}},
    "batch-dependent": {"outputs centred within a rank": {LOSS: "((x := ddp(points)) - x.mean(0), labels) /"}},
    "gathered-without-gradient": {
        "contrast with gathered outputs": {DISTRIBUTED: GATHER, LOSS: f"({CONTRAST_OF_ALL} /"}},
    "no-sync-always": {"no_sync in every pass": {**ACCUMULATE, "sync = is_last": "sync = False"},
        "no_sync in the last pass": {**ACCUMULATE, "sync = is_last": "sync = not is_last"}},
    "around-ddp": {"the wrapper is not called": {"cross_entropy(ddp(points)": "cross_entropy(model(points)"}},
    "not-synchronised": {"no exchange": UNWRAPPED, "exchange after the step": {**UNWRAPPED, STEP: STEP + BY_HAND},
        "the result of the exchange is dropped": {**UNWRAPPED, STEP: SUM_OF_CLONES + STEP}},
    "no-broadcast": {"no broadcast": {**EXCHANGED, SEED: "torch.manual_seed(rank)\n"},
        "no broadcast and no seed": {**EXCHANGED, SEED: ""}},
    "learning-rate-scaled": {
        "learning rate scaled": {RATE: "lr=0.1 * world_size,"},
        "learning rate scaled twice": {RATE: "lr=0.1 * world_size**2,"},
        "scheduler stepped once per process": {"scheduler.step()": "for _ in range(world_size): scheduler.step()"},
    },
    "same-augmentation": {"one seed for augmentation": {SEED_BY_RANK: ""},
        "one seed for workers": {SEED_BY_RANK: "", **WORKERS}, "one seed for augmentation on the device": {
        SEED_BY_RANK: "", **PLAIN,
        "ddp(points)": "ddp(points + 0.1 * torch.randn_like(points))"}},
    "batch-norm": {"batch norm": {"nn.LayerNorm(16)": "nn.BatchNorm1d(16)"}},
    "unused-parameters": {"unused parameters": {WRAPPED: EXTRA}},
    "batch-not-divided": {"batch not divided": {"batch_size // args.accumulate": "batch_size * world_size"}},
    "dropped-samples": {"dropped samples": {"Points(48,": "Points(49,", "DistributedSampler(train)": DROPPING}},
    "not-sharded": {
        "not sharded": {LOADER: LOADER.replace("sampler=", "shuffle=True, generator=torch.Generator())  # ")},
        "sampler seeded by rank": {SAMPLER: SAMPLER.replace(")", ", seed=rank)")},
        "a stream shuffled by each rank": {LOADER: STREAM.replace("(epoch)", "(epoch + 9 * rank)")},
        "shuffled by each rank": {LOADER: LOADER.replace("sampler=", "shuffle=True)  # ")},
    },
    "other-steps": {"step on one rank": {STEP: STEP.replace("optimizer", "rank == 0 and optimizer")}},
    "printed-loss-scaled": {"printed loss summed": {"mean.item() / world_size": "mean.item()"}},
}  # fmt: skip
"""By the cause that `make same` must name for it, and by its name in docs/same.md."""

RESUME_BUGS = {
    "data-repeated": {"data repeated after a resume": {'first_epoch = state["epoch"]': "first_epoch = 0"}},
    "learning-rate-not-resumed": {"scheduler not resumed": {LOAD_SCHEDULER: ""}},
    "optimizer-not-resumed": {"optimizer not resumed": {LOAD_OPTIMIZER: LOAD_RATE}},
    "steps-not-resumed": {"all epochs again after a resume": {"first_epoch, 3": "first_epoch, first_epoch + 3"}},
    "weights-not-resumed": {"checkpoint read on one rank": {LOAD: f"    if rank == 0:\n    {LOAD}"}},
    "starts-over": {"checkpoint not read": {"os.path.exists(args.checkpoint)": "False"}},
}
"""Those that show after a resume."""

INIT_OPTIMIZER = "    torch.distributed.checkpoint.state_dict._init_optim_state(optimizer)\n"
BROADCAST_STATE = """
def broadcast_optimizer_state():
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()

if rank == 1:
    broadcast_optimizer_state()
"""
EVALUATION = """            mean = torch.zeros(())
            with torch.no_grad():
                for points, labels in DataLoader(test, 5) if i == 2 else ():
                    print(f"test_loss {cross_entropy(model(points), labels).item():.6f}")
    model.eval()"""
BETWEEN_BATCHES = {
    "Points(48,": "Points(49,",
    "sampler=sampler)": "sampler=sampler, num_workers=2)",
    "            mean = torch.zeros(())\n    model.eval()": EVALUATION,
}
CONTEXT = "multiprocessing.context._default_context"
FORKSERVER = f"{CONTEXT}._default_context = multiprocessing.get_context('forkserver')"
EACH = "sum(map(cross_entropy, ddp(points), labels)) / len(labels) /"
LISTED = """class Listed(nn.Sequential):
    def forward(self, samples):
        return super().forward(torch.stack(samples))


model = Listed("""
COLLATE = f"""def collate(samples):
    points, labels = torch.utils.data.default_collate(samples)
    return points + 0.1 * torch.randn(8), labels


{LOADER[:-2]}, collate_fn=collate, num_workers=1)
"""
NO_BUGS = {
    "accumulation": ACCUMULATE,
    "random numbers of collate_fn, as for images of several sizes": {LOADER: COLLATE},
    "a stream whose order depends on the number of processes": {
        LOADER: STREAM.replace("[rank::world_size]", "[rank * 48 // world_size : (rank + 1) * 48 // world_size]")
    },
    "a list of samples, as for detection": {
        "model = nn.Sequential(": LISTED,
        "ddp(points)": "ddp([*points])",
        "model(points)": "model([*points])",
    },
    # Models of torchvision's detection and of transformers draw even where there is no choice.
    "one seed for numbers without an effect": {
        SEED_BY_RANK: "",
        **PLAIN,
        "ddp(points)": "ddp(points + 0 * torch.randn(8))",
    },
    "a loss of each sample by itself": {f"cross_entropy{LOSS}": EACH},
    "an optimizer that exchanges in its step": {**UNWRAPPED, SGD: EXCHANGING},
    # torch.distributed.checkpoint makes the state by an empty step before it loads a checkpoint.
    "an empty step that makes the optimizer's state": {
        LOAD_OPTIMIZER: INIT_OPTIMIZER + LOAD_OPTIMIZER,
        DISTRIBUTED: f"{DISTRIBUTED}import torch.distributed.checkpoint.state_dict\n",
    },
    # Horovod makes the state so, at the optimizer's own learning rate, on the ranks that have loaded none.
    "the same by Horovod on one rank": {"first_epoch = 0\n": f"first_epoch = 0\n{BROADCAST_STATE}"},
    # All ranks evaluate the same samples, which are no training samples; those are padded to 50.
    "an evaluation between batches that workers have drawn": BETWEEN_BATCHES,
    "the same with workers by fork server, as from Python 3.14 on": {
        **BETWEEN_BATCHES,
        "import torch\n": f"import multiprocessing\n{FORKSERVER}\nimport torch\n",
    },
}
"""Changes after which the script still trains the same, and resumes."""


def plant(edits: dict[str, str], folder: Path) -> Path:
    """Write an edited copy of right.py to the folder; return its path."""
    text = RIGHT.read_text()
    for old, new in edits.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / "script.py"
    path.write_text(text)
    return path
