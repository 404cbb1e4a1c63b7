"""Context parallelism: each sequence divided over N ranks, which gather keys and values; and replicas of these.

Run `torchrun --nproc-per-node=4 recipes/context/minimal.py --context-parallel 2`; train.py has all options.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

SEED, BATCH_SIZE, LR, SEQ_LEN, WIDTH, HEADS, DEPTH = 0, 16, 0.001, 256, 64, 4, 4
TEXT = Path(os.__file__).parent / "pydoc_data" / "topics.py"  # some 700 kB of Python's manual


class Block(nn.Module):
    """A transformer's block; attend() takes queries, keys and values (B, HEADS, positions, WIDTH / HEADS)."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.attend, self.norm1, self.norm2 = attend, nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project, up = (nn.Linear(WIDTH, n * WIDTH, bias=False) for n in (3, 1, 4))
        self.mlp = nn.Sequential(up, nn.GELU(), nn.Linear(4 * WIDTH, WIDTH, bias=False))

    def forward(self, stream: Tensor) -> Tensor:
        """Map (B, positions, WIDTH) to the same shape; only attend() mixes positions."""
        qkv = self.qkv(self.norm1(stream)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        stream = stream + self.project(self.attend(*qkv).transpose(1, 2).flatten(2))
        return stream + self.mlp(self.norm2(stream))


def main() -> None:
    """Train, evaluate after each epoch, and print the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--log-every", type=int, default=10, help="steps between printed losses")
    parser.add_argument("--text", type=Path, default=TEXT, help="file to learn; its last tenth is for testing")
    parser.add_argument("--context-parallel", type=int, default=2, help="ranks that divide each sequence")
    args = parser.parse_args()
    # Context: torchrun sets each process's rank; each takes its GPU and connects at MASTER_ADDR:MASTER_PORT.
    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
    torch.cuda.set_device(device if device.type == "cuda" else -1)  # -1: no effect
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", device_id=device.index)
    # Context: the ranks form a grid, a row for each replica. The ranks of a replica take the same samples.
    grid = torch.arange(world_size).view(-1, args.context_parallel)
    mesh = DeviceMesh(device.type, grid, mesh_dim_names=("dp", "cp"))
    replicas, replica, cp = mesh.size(0), mesh.get_local_rank("dp"), mesh["cp"]
    # Context: rank r has chunks r and 2N-1-r of 2N, one with few keys before it, one with many: equal work.
    chunks = (cp.get_local_rank(), 2 * cp.size() - 1 - cp.get_local_rank())
    positions = torch.cat([torch.arange(SEQ_LEN).chunk(2 * cp.size())[chunk] for chunk in chunks]).to(device)
    size = SEQ_LEN // (2 * cp.size())  # positions per chunk; the masks are causal, aligned to the last key
    masks = {(chunk + 1) * size: causal_lower_right(size, (chunk + 1) * size) for chunk in chunks}
    text = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8).long().to(device)
    train, test = (part.unfold(0, SEQ_LEN + 1, SEQ_LEN) for part in text.tensor_split([len(text) * 9 // 10]))
    turn = (1j * positions[:, None] * 10_000 ** -torch.arange(0, 1, 2 * HEADS / WIDTH, device=device)).exp()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        turned = (torch.complex(*vectors.float().chunk(2, -1)) * turn for vectors in (q, k))  # rotary positions
        q, k = (torch.cat((vectors.real, vectors.imag), -1).to(v.dtype) for vectors in turned)
        # Context: all-gathers keys and values, and in backward reduce-scatters their gradients: each time, a rank
        # sends (N-1)/N of 8 x B x SEQ_LEN x WIDTH bytes. All else needs no other rank's positions.
        both = DTensor.from_local(torch.stack((k, v)), cp, [Shard(3)]).full_tensor(grad_placements=[Partial()])
        parts = both.chunk(2 * cp.size(), 3)  # rank 0's first chunk and its second, rank 1's first, ...
        k, v = torch.cat(parts[::2] + parts[::-2], 3)  # in the sequence's order: the second chunks come backwards
        pairs = zip(q.chunk(2, 2), masks.items(), strict=True)  # a chunk's queries, the end of its keys, its mask
        mixed = [scaled_dot_product_attention(x, k[:, :, :end], v[:, :, :end], mask) for x, (end, mask) in pairs]
        return torch.cat(mixed, 2)

    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Embedding(256, WIDTH), *(Block(attend) for _ in range(DEPTH)), nn.LayerNorm(WIDTH))
    for name, weight in model.named_parameters():
        if weight.dim() > 1:  # the last layers of a block add to the stream: smaller weights
            nn.init.normal_(weight, std=0.02 / (2 * DEPTH) ** (("project" in name or "mlp.2" in name) / 2))
    model.append(nn.Linear(WIDTH, 256, bias=False)).to(device)[-1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    # Context: each rank has the gradient of its own positions; backward() averages them over all ranks.
    ddp = nn.parallel.DistributedDataParallel(model)

    def loss_sum(windows: Tensor) -> Tensor:  # over this rank's positions; a byte's target is the one after it
        inputs, targets = windows[:, positions], windows[:, positions + 1]
        return cross_entropy(ddp(inputs).flatten(0, 1), targets.flatten(), reduction="sum")

    started, epoch_steps = time.perf_counter(), len(train) // BATCH_SIZE
    for epoch in range(args.epochs):
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))  # the same on all ranks
        for step, batch in enumerate(order.to(device).split(BATCH_SIZE)[:epoch_steps], epoch * epoch_steps + 1):
            optimizer.zero_grad()
            share = batch.tensor_split(replicas)[replica]  # Context: each replica takes its share of the batch
            # Context: gradients are averaged over the ranks; the factor world_size makes this the batch's mean.
            loss = loss_sum(train[share]) / (BATCH_SIZE * SEQ_LEN) * world_size
            loss.backward()
            optimizer.step()
            if step % args.log_every == 0:
                dist.all_reduce(total := loss.detach())  # Context: sums the losses of the ranks, 4 bytes each
                if rank == 0:
                    print(f"step {step} loss {total.item() / world_size:.8f}")
        with torch.no_grad():
            total = loss_sum(test.tensor_split(replicas)[replica])
        dist.all_reduce(total)  # Context: sums the losses of all positions, 4 bytes per rank, before the division
        test_loss = total.item() / (len(test) * SEQ_LEN)
        if rank == 0:
            print(f"epoch {epoch + 1} test_loss {test_loss:.8f}")
    speed = args.epochs * epoch_steps * BATCH_SIZE / (time.perf_counter() - started)
    if rank == 0:
        print(f"result recipe=context {world_size=} {test_loss=:.4f} samples_per_s={speed:.0f}")
    dist.barrier()  # Context: no rank disconnects while another still waits for it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
