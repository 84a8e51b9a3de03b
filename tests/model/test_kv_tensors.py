"""The KV cache's tensors: zeroed, apart from one another, and all in as few large pages as they fill."""

from __future__ import annotations

import torch

from stageline.worker.device import zeros

CPU = torch.device("cpu")


def test_tensors_lie_one_behind_the_other_on_cache_lines() -> None:
    shapes = [(3, 5), (1, 7), (0, 4), (2, 64)]
    tensors = zeros(shapes, torch.bfloat16, CPU)
    assert [tuple(tensor.shape) for tensor in tensors] == shapes
    assert not any(tensor.any() for tensor in tensors)
    places = [tensor.data_ptr() - tensors[0].data_ptr() for tensor in tensors if tensor.numel()]
    assert places == [0, 64, 128]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number + 1)
    assert [tensor.unique().tolist() for tensor in tensors] == [[1.0], [2.0], [], [4.0]]


def test_no_tensors_need_no_memory() -> None:
    assert zeros([], torch.float32, CPU) == []
