"""What a sum over the ranks of a stage costs: through shared memory, and by gloo, which it replaces on one machine.

    .venv/bin/python benchmarks/ranks.py [--ranks 2] [--hidden 2048]

A row for each number of tokens: medians of both, in microseconds, and how many times longer gloo takes. To be run where
every rank finds a core that does nothing else.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection

import torch

from stageline import kernels
from stageline.parallel.process_group import ProcessGroupRanks
from stageline.parallel.shared_memory import SharedMemoryRanks, map_memory
from stageline.parallel.tensor_parallel import TensorParallel
from stageline.pipeline.rank_memory import shared_bytes

ROUNDS = 300
TOKENS = (1, 4, 16, 64, 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=2048)
    args = parser.parse_args()
    context = multiprocessing.get_context("fork")
    fd = os.memfd_create("ranks")
    os.ftruncate(fd, shared_bytes(args.ranks))
    with tempfile.TemporaryDirectory() as folder:
        found, told = context.Pipe(duplex=False)
        processes = [
            context.Process(target=measure, args=(rank, args.ranks, args.hidden, fd, f"{folder}/meet", told))
            for rank in range(args.ranks)
        ]
        for process in processes:
            process.start()
        median_s: dict[str, list[float]] = {"shared": [], "gloo": []}
        for name in median_s:
            median_s[name] = [float(found.recv_bytes()) for _ in TOKENS]
        for process in processes:
            process.join()
    print(f"{args.ranks} ranks, hidden {args.hidden}, bfloat16, median of {ROUNDS} sums")
    print("tokens  shared memory us  gloo us  times")
    for tokens, shared_s, gloo_s in zip(TOKENS, median_s["shared"], median_s["gloo"], strict=True):
        print(f"{tokens:6}  {shared_s * 1e6:16.0f}  {gloo_s * 1e6:7.0f}  {gloo_s / shared_s:5.1f}")


def measure(rank: int, size: int, hidden: int, fd: int, meeting_file: str, told: Connection) -> None:
    """In a process for each rank; the first one tells each median in seconds."""
    torch.set_num_threads(1)
    library = kernels.library(torch.device("cpu"), torch.bfloat16)
    assert library is not None, "there are no compiled kernels"
    groups: list[TensorParallel] = [
        SharedMemoryRanks(library, map_memory(fd, size), rank, size),
        ProcessGroupRanks(meeting_file, rank, size, torch.device("cpu")),
    ]
    for group in groups:
        for tokens in TOKENS:
            x = torch.ones(tokens, hidden, dtype=torch.bfloat16)
            times_s = []
            for _ in range(ROUNDS):
                start_s = time.perf_counter()
                group.all_reduce(x)
                times_s.append(time.perf_counter() - start_s)
            if rank == 0:
                told.send_bytes(str(statistics.median(times_s)).encode())


if __name__ == "__main__":
    main()
