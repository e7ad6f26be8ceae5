"""What the order costs at the scale of JFT-3B, and how well it mixes. Prints tables, judges nothing.

    python tests/bench/order.py [--shards 300000] [--samples 3000000000]

Every step is a process of its own, so that its memory is its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from vitscale.data.order import Order
from vitscale.data.shards import load_index

BATCH = 4096
WORLD = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=300_000)
    parser.add_argument("--samples", type=int, default=3_000_000_000)
    arguments = parser.parse_args()
    print(f"{arguments.shards:,} shards, {arguments.samples:,} samples, batch {BATCH}, one rank of {WORLD}")
    print(f"{'step':>12} {'build':>9} {'first batch':>12} {'more memory':>12} {'us/sample':>10}")
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for step in (0, 10_000_000):
            print(pool.apply(cost, (arguments.shards, arguments.samples, step)))
        print("\nreading an index.json of as many shards in an object store, in a process of its own")
        with tempfile.TemporaryDirectory() as folder:
            pool.apply(write_index, (folder, arguments.shards, arguments.samples))
            print(pool.apply(index_cost, (folder,)))
    print("\nmixing: 2,000 shards of 1,000 samples, one class a shard; batches of 1,024 from all over an epoch")
    print(f"{'window':>7} {'classes a batch':>16} {'at random':>10} {'chi-square / freedom':>21}")
    for window in (1, 4, 16, 64, 250):
        print(mixing(window))
    print("\npairs of samples in one batch that are in one batch in the next epoch too, 2,000,000 samples")
    again, by_chance = neighbours()
    print(f"{again:.2e}, by chance {by_chance:.2e}")
    print("\n3,000 shards of 1,000 samples, one epoch, 512 streams, nodes of 8 ranks")
    print(f"{'nodes':>6} {'samples fetched over used':>26} {'shards a rank has in use at one time':>38}")
    for nodes in (1, 2, 4, 16, 64):
        print(f"{nodes:>6} {fetched(8 * nodes):>26.3f} {in_use(8 * nodes):>38.0f}")


def cost(shards: int, samples: int, step: int) -> str:
    sizes = np.full(shards, samples // shards)
    before = peak()
    begin = time.perf_counter()
    order = Order(sizes, seed=0, global_batch=BATCH, run=10)
    built = time.perf_counter()
    order.rank_ids(step, 5, WORLD)
    first = time.perf_counter()
    steps = 64
    for i in range(10):
        order.plan(order.rank_positions(step + i * steps, 5, WORLD, steps=steps).reshape(-1))
    each = (time.perf_counter() - first) / (10 * steps * BATCH // WORLD)
    memory = peak() - before
    return f"{step:>12,} {built - begin:>7.3f} s {first - built:>10.3f} s {memory / 1e6:>9.0f} MB {each * 1e6:>10.2f}"


def write_index(folder: str, shards: int, samples: int) -> None:
    each = samples // shards
    lines = [
        {"name": f"s3://bucket/train-{n:06d}.tar", "samples": each, "bytes": each * 110_000, "sha256": f"{n:064x}"}
        for n in range(shards)
    ]
    content = {"format": "vitscale-index", "version": 1, "classes": [], "shards": lines}
    (Path(folder) / "index.json").write_text(json.dumps(content))


def index_cost(folder: str) -> str:
    before = peak()
    begin = time.perf_counter()
    index = load_index(folder)
    seconds, size = time.perf_counter() - begin, (Path(folder) / "index.json").stat().st_size
    more = (peak() - before) / 1e6
    return f"{len(index.names):,} shards, {size / 1e6:.0f} MB: {seconds:.2f} s, {more:.0f} MB more memory at its peak"


def neighbours() -> tuple[float, float]:
    batch, samples = 1024, 2_000_000
    order = Order(np.full(2000, 1000), seed=0, global_batch=batch, run=10)
    steps = samples // batch
    where = np.full((2, samples), -1)
    for epoch in range(2):
        first = epoch * samples // batch + epoch
        ids = order.at(first * batch, steps * batch)
        where[epoch, ids] = np.arange(len(ids)) // batch
    both = (where >= 0).all(axis=0)
    _, counts = np.unique(where[0, both] * (2 * steps) + where[1, both], return_counts=True)
    _, first_counts = np.unique(where[0, both], return_counts=True)
    pairs = float((counts * (counts - 1) / 2).sum())
    return pairs / float((first_counts * (first_counts - 1) / 2).sum()), (batch - 1) / (samples - 1)


def in_use(ranks: int) -> float:
    """Shards that a rank reads from within as many steps as its groups last."""
    order = Order(np.full(3000, 1000), seed=0, global_batch=BATCH, streams=512, run=10)
    steps = max(1, order.samples_in_use(ranks) * ranks // BATCH)
    return float(len(np.unique(order.plan(order.rank_positions(100, 0, ranks, steps=steps).reshape(-1)).shards)))


def mixing(window: int) -> str:
    batch, classes = 1024, 2000
    order = Order(np.full(classes, 1000), seed=0, global_batch=batch, run=10, window=window)
    seen, chi = [], []
    for step in range(0, order.num_samples // batch, 20):
        counts = np.bincount(order.locate(order.at(step * batch, batch))[0], minlength=classes)
        seen.append(np.count_nonzero(counts))
        chi.append(((counts - batch / classes) ** 2).sum() / (batch / classes) / (classes - 1))
    at_random = classes * (1 - (1 - 1 / classes) ** batch)
    return f"{window:>7} {np.mean(seen):>16.0f} {at_random:>10.0f} {np.mean(chi):>21.2f}"


def fetched(ranks: int) -> float:
    order = Order(np.full(3000, 1000), seed=0, global_batch=BATCH, streams=512, run=10)
    steps = order.num_samples // BATCH
    total = 0
    for rank in range(ranks):
        plan = order.plan(order.rank_positions(0, rank, ranks, steps=steps).reshape(-1))
        runs = np.unique(plan.shards * 1000 + plan.starts, return_index=True)[1]
        total += int((plan.stops - plan.starts)[runs].sum())
    return total / (steps * BATCH)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
