"""Bugs to plant in right.py: each is a few replacements of text that stands in it once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

RIGHT = Path(__file__).with_name("right.py")

WRAPPED = "ddp = DistributedDataParallel(model)\n"
STEP = "            optimizer.step()\n"
BY_HAND = """            for weight in model.parameters():
                dist.all_reduce(weight.grad)
                weight.grad /= world_size
"""
UNWRAPPED = {WRAPPED: "ddp = model\n"}
SAMPLER = "sampler = DistributedSampler(train)\n"
LOADER = "loader = DataLoader(train, args.batch_size // args.accumulate, sampler=sampler)\n"
SHARE = "        points, labels = test.points[rank::world_size], test.labels[rank::world_size]\n"
PADDED = """        indices = list(DistributedSampler(test, shuffle=False))
        points, labels = test.points[indices], test.labels[indices]
"""
MEANS = "        total[0], total[1] = total[0] / total[1], 1\n"
REDUCE = "    dist.all_reduce(total)\n"
LOAD = '    model.load_state_dict(state["model"])\n'


@dataclass(frozen=True)
class Bug:
    """A bug, and the cause that `make same` must name for it."""

    cause: str
    edits: dict[str, str]
    options: tuple[str, ...] = ()
    """Options of the command, in addition to the script and its batch size."""
    argv: tuple[str, ...] = ()


RATE_ONLY = "    optimizer.param_groups[0]['lr'] = state['optimizer']['param_groups'][0]['lr']\n"
RESUME = ("--resume", "auto")
BUGS = {
    "loss divided by the world size": Bug(
        "loss-scaled", {"(ddp(points), labels) /": "(ddp(points), labels) / world_size /"}
    ),
    "loss multiplied by it": Bug(
        "loss-scaled", {"(ddp(points), labels) /": "(ddp(points), labels) * world_size /"}
    ),
    "gradients summed, not averaged": Bug(
        "loss-scaled", {**UNWRAPPED, STEP: BY_HAND.replace("/= world_size", "/= 1") + STEP}
    ),
    "no set_epoch": Bug("no-set-epoch", {"    sampler.set_epoch(epoch)\n": ""}),
    "padded evaluation": Bug("padded-evaluation", {SHARE: PADDED}),
    "evaluation of one rank": Bug("one-rank-evaluation", {REDUCE: ""}),
    "evaluation by the mean of means": Bug("mean-of-means", {REDUCE: MEANS + REDUCE}),
    "no_sync in every pass": Bug("no-sync-always", {"sync = is_last": "sync = False"}, argv=("--accumulate", "2")),
    "no_sync in the last pass": Bug(
        "no-sync-always", {"sync = is_last": "sync = not is_last"}, argv=("--accumulate", "2")
    ),
    "the wrapper is not called": Bug("around-ddp", {"cross_entropy(ddp(points)": "cross_entropy(model(points)"}),
    "no exchange": Bug("not-synchronised", UNWRAPPED),
    "exchange after the step": Bug("not-synchronised", {**UNWRAPPED, STEP: STEP + BY_HAND}),
    "the result of the exchange is dropped": Bug(
        "not-synchronised",
        {
            **UNWRAPPED,
            STEP: BY_HAND.replace("weight.grad)", "weight.grad.clone())").replace("/= world_size", "/= 1") + STEP,
        },
    ),
    "no broadcast": Bug(
        "no-broadcast", {**UNWRAPPED, STEP: BY_HAND + STEP, "torch.manual_seed(0)": "torch.manual_seed(rank)"}
    ),
    "no broadcast and no seed": Bug(
        "no-broadcast", {**UNWRAPPED, STEP: BY_HAND + STEP, "torch.manual_seed(0)\n": ""}
    ),
    "learning rate scaled": Bug("learning-rate-scaled", {"lr=0.1,": "lr=0.1 * world_size,"}),
    "learning rate scaled twice": Bug("learning-rate-scaled", {"lr=0.1,": "lr=0.1 * world_size**2,"}),
    "one seed for augmentation": Bug("same-augmentation", {"torch.manual_seed(100 + rank)\n": ""}),
    "one seed for workers": Bug(
        "same-augmentation",
        {"torch.manual_seed(100 + rank)\n": "", "sampler=sampler)": "sampler=sampler, num_workers=1)"},
    ),
    "one seed for augmentation on the device": Bug(
        "same-augmentation",
        {
            "torch.manual_seed(100 + rank)\n": "",
            "(48, 1, 0.1)": "(48, 1, 0.0)",
            "ddp(points)": "ddp(points + 0.1 * torch.randn_like(points))",
        },
    ),
    "batch norm": Bug("batch-norm", {"nn.LayerNorm(16)": "nn.BatchNorm1d(16)"}),
    "unused parameters": Bug(
        "unused-parameters",
        {WRAPPED: f"model.extra = nn.Parameter(torch.zeros(3))\n{WRAPPED[:-1]} if world_size > 1 else model\n"},
    ),
    "batch not divided": Bug(
        "batch-not-divided",
        {"args.batch_size // args.accumulate, sampler": "args.batch_size * world_size, sampler"},
    ),
    "dropped samples": Bug(
        "dropped-samples",
        {"Points(48,": "Points(49,", SAMPLER: SAMPLER.replace(")", ", shuffle=False, drop_last=True)")},
    ),
    "not sharded": Bug(
        "not-sharded", {LOADER: LOADER.replace("sampler=", "shuffle=True, generator=torch.Generator())  # ")}
    ),
    "step on one rank": Bug("other-steps", {STEP: STEP.replace("optimizer", "rank == 0 and optimizer")}),
    "sampler seeded by rank": Bug("not-sharded", {SAMPLER: SAMPLER.replace(")", ", seed=rank)")}),
    "shuffled by each rank": Bug("not-sharded", {LOADER: LOADER.replace("sampler=", "shuffle=True)  # ")}),
    "mean of unequal shares": Bug(
        "mean-of-means",
        {
            "Points(48,": "Points(51,",
            LOADER: "shares = [b.tensor_split(world_size)[rank].tolist() for b in torch.arange(51).split(12)]\n"
            "loader = DataLoader(train, batch_sampler=shares)\n",
        },
    ),
    "printed loss summed": Bug("printed-loss-scaled", {"mean.item() / world_size": "mean.item()"}),
    "data repeated after a resume": Bug(
        "data-repeated", {'first_epoch = state["epoch"]': "first_epoch = 0"}, RESUME
    ),
    "scheduler not resumed": Bug(
        "learning-rate-not-resumed", {'    scheduler.load_state_dict(state["scheduler"])\n': ""}, RESUME
    ),
    "optimizer not resumed": Bug(
        "optimizer-not-resumed",
        {'    optimizer.load_state_dict(state["optimizer"])\n': RATE_ONLY},
        RESUME,
    ),
    "all epochs again after a resume": Bug(
        "steps-not-resumed", {"range(first_epoch, 3)": "range(first_epoch, first_epoch + 3)"}, RESUME
    ),
    "checkpoint read on one rank": Bug("weights-not-resumed", {LOAD: f"    if rank == 0:\n    {LOAD}"}, RESUME),
    "checkpoint not read": Bug("starts-over", {"os.path.exists(args.checkpoint)": "False"}, RESUME),
}


def plant(edits: dict[str, str], folder: Path) -> Path:
    """Write an edited copy of right.py to the folder; return its path."""
    text = RIGHT.read_text()
    for old, new in edits.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / "script.py"
    path.write_text(text)
    return path
