"""What a stage reads of the checkpoint: README's claim that a stage touches its own layers' bytes only.

    python benchmarks/stage_reads.py MODEL.gguf [--stages 2]

Each stage is loaded in a process of its own; the operating system counts what it read (/proc/PID/io, rchar), beginning
after the file's index was read. One row per stage: bytes read, and their share of the file's tensors.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from stageline.checkpoint import open_checkpoint, stage_file_bytes
from stageline.pipeline.partition import partition_layers

_CHILD = """
import sys, torch
from stageline.checkpoint import open_checkpoint
from stageline.clock import MonotonicClock
from stageline.pipeline.partition import partition_layers
from stageline.timeline.recorder import Recorder
from stageline.worker.build import build_stage

def num_bytes_read():
    return int(open("/proc/self/io").read().split("rchar: ")[1].split()[0])

model, num_stages, index = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
checkpoint = open_checkpoint(model)
part = partition_layers(checkpoint.spec.num_layers, num_stages, None)[index]
torch.zeros(1).sum()
import stageline.models.llama
before = num_bytes_read()
build_stage(checkpoint, part, dtype="bfloat16", device="cpu", max_model_len=128, clock=MonotonicClock(),
            recorder=Recorder(1), on_progress=lambda read, total: None)
print(num_bytes_read() - before)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--stages", type=int, default=2)
    args = parser.parse_args()
    checkpoint = open_checkpoint(args.model)
    total = sum(entry.num_bytes for entry in checkpoint.tensors.values())
    print(f"tensors in the file: {total:,} bytes")
    for part in partition_layers(checkpoint.spec.num_layers, args.stages, None):
        command = [sys.executable, "-c", _CHILD, args.model, str(args.stages), str(part.stage_index)]
        counted = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        own = stage_file_bytes(checkpoint, part.layers, part.is_first, part.is_last)
        print(
            f"s{part.stage_index} layers [{part.layers.start}, {part.layers.stop}): read {counted:,} bytes "
            f"({counted / total:.1%} of all; its own tensors are {own:,})"
        )


if __name__ == "__main__":
    main()
