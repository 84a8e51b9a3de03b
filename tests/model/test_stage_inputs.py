"""A stage's memory of block tables: what it makes of a microbatch, what it refuses, and the devices it runs on."""

from __future__ import annotations

import resource

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.checkpoint.model_spec import ModelSpec, RopeSpec
from stageline.errors import ConfigError, FrameError
from stageline.kv.kv_size import kv_bytes_per_block, kv_bytes_per_token
from stageline.pipeline.microbatch import AddedRequest, ExtendedTable, Microbatch, MicrobatchLimits
from stageline.sampling import SamplerSpec
from stageline.worker.device import free_memory_bytes, resolve_device, resolve_dtype
from stageline.worker.input_buffers import InputBuffers
from stageline.worker.kv_tensors import allocate_kv_tensors
from tests.model.requests_under_test import RequestsUnderTest

CPU = torch.device("cpu")
LIMITS = MicrobatchLimits(
    num_blocks=32, block_size=4, vocab_size=100, max_num_seqs=3, max_num_batched_tokens=64, max_model_len=24
)
SPEC = ModelSpec(
    family="llama", num_layers=4, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96,
    vocab_size=100, max_position_embeddings=64, rms_norm_eps=1e-5, rope=RopeSpec(), tie_word_embeddings=False,
)


def added(number: int, block_ids: list[int]) -> AddedRequest:
    return AddedRequest(number, 1, block_ids, SamplerSpec(seed=0), [])


def microbatch(
    rows: dict[int, tuple[int, int]],
    added: list[AddedRequest] | None = None,
    extended: list[ExtendedTable] | None = None,
    removed: list[int] | None = None,
) -> Microbatch:
    """rows: request number -> (computed, scheduled) tokens."""
    computed, scheduled = [row[0] for row in rows.values()], [row[1] for row in rows.values()]
    tokens = [1] * sum(scheduled)
    return Microbatch(0, 5, removed or [], added or [], extended or [], list(rows), computed, scheduled, tokens, [])


def test_metadata_says_where_each_token_stands() -> None:
    buffers = InputBuffers(LIMITS, CPU)
    buffers.apply_and_build(microbatch({7: (0, 5)}, added=[added(7, [20, 9])]))
    metadata = buffers.apply_and_build(
        microbatch({7: (5, 1), 8: (0, 6)}, added=[added(8, [3, 31])], extended=[ExtendedTable(7, [11])])
    )
    assert metadata.num_decode_rows == 1
    assert metadata.positions.tolist() == [5, 0, 1, 2, 3, 4, 5]
    assert metadata.slot_mapping.tolist() == [9 * 4 + 1, 12, 13, 14, 15, 31 * 4, 31 * 4 + 1]
    assert metadata.context_lens.tolist() == [6, 6]
    assert metadata.query_starts.tolist() == [0, 1, 7]
    assert metadata.block_tables.tolist() == [[20, 9], [3, 31]]
    assert metadata.block_tables.dtype == metadata.query_starts.dtype == torch.int32
    assert metadata.positions.dtype == metadata.slot_mapping.dtype == torch.int64


def test_block_tables_are_zero_past_a_rows_end_even_where_blocks_are_reserved() -> None:
    buffers = InputBuffers(LIMITS, CPU)
    metadata = buffers.apply_and_build(
        microbatch({1: (0, 1), 2: (0, 9)}, added=[added(1, [5, 6, 7]), added(2, [8, 9, 10])])
    )
    assert metadata.block_tables.tolist() == [[5, 0, 0], [8, 9, 10]]


def test_metadata_does_not_change_when_the_next_microbatch_is_applied() -> None:
    buffers = InputBuffers(LIMITS, CPU)
    metadata = buffers.apply_and_build(microbatch({1: (0, 4)}, added=[added(1, [5])]))
    before = metadata.block_tables.clone(), metadata.slot_mapping.clone()
    buffers.apply_and_build(microbatch({2: (0, 4)}, removed=[1], added=[added(2, [6])]))
    assert torch.equal(metadata.block_tables, before[0]) and torch.equal(metadata.slot_mapping, before[1])


def test_a_removed_requests_row_is_free_again_and_starts_empty() -> None:
    buffers = InputBuffers(LIMITS, CPU)
    for number in range(10):
        removed = [number - 1] if number else []
        metadata = buffers.apply_and_build(
            microbatch({number: (0, 2)}, removed=removed, added=[added(number, [number])])
        )
        assert metadata.slot_mapping.tolist() == [number * 4, number * 4 + 1]
    assert buffers.num_requests == 1


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_slots_follow_the_block_table_for_any_history(data: st.DataObject) -> None:
    requests, buffers = RequestsUnderTest(LIMITS), InputBuffers(LIMITS, CPU)
    for number in range(3):
        requests.add(number, [1] * data.draw(st.integers(1, 18)))
    for _ in range(5):
        pending = {number: len(one.tokens) - one.num_computed for number, one in requests.requests.items()}
        chosen = data.draw(st.sets(st.sampled_from(sorted(pending)), min_size=1))
        batch = requests.microbatch({number: data.draw(st.integers(1, pending[number])) for number in chosen})
        metadata = buffers.apply_and_build(batch)
        positions, slots = [], []
        for row, number in enumerate(batch.request_numbers):
            first = batch.num_computed_tokens[row]
            for position in range(first, first + batch.num_scheduled_tokens[row]):
                positions.append(position)
                slots.append(requests.requests[number].blocks[position // 4] * 4 + position % 4)
        assert metadata.positions.tolist() == positions
        assert metadata.slot_mapping.tolist() == slots
        requests.append(batch, [1] * len(batch.sampling_rows))


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (microbatch({9: (0, 1)}), "request 9 was never added"),
        (microbatch({}, removed=[9]), "request 9 is removed but was never added"),
        (microbatch({}, removed=[1, 1]), "request 1 is removed but was never added"),
        (microbatch({}, added=[added(1, [])]), "request 1 is added twice"),
        (microbatch({}, added=[added(8, []), added(8, [])]), "request 8 is added twice"),
        (microbatch({}, extended=[ExtendedTable(9, [1])]), "request 9 was never added"),
        (microbatch({1: (4, 1)}, removed=[1]), "request 1 was never added, or was removed"),
        (microbatch({}, added=[added(number, []) for number in (2, 3, 4)]), "more than max_num_seqs 3"),
        (microbatch({1: (4, 5)}), "request 1 has 2 blocks, its tokens need 3"),
        (microbatch({}, extended=[ExtendedTable(1, [1, 2, 3, 4, 5])]), "request 1 has 7 blocks, limit 6"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_the_known_requests_is_refused(refused: Microbatch, words: str) -> None:
    buffers = InputBuffers(LIMITS, CPU)
    buffers.apply_and_build(microbatch({1: (0, 4)}, added=[added(1, [5, 6])]))
    with pytest.raises(FrameError, match=f"m5: .*{words}"):
        buffers.apply_and_build(refused)


def test_kv_bytes_are_what_the_tensors_take() -> None:
    caches = allocate_kv_tensors(SPEC, 3, 10, 4, torch.bfloat16, CPU)
    taken = sum(tensor.numel() * tensor.element_size() for cache in caches for tensor in (cache.keys, cache.values))
    assert taken == 10 * kv_bytes_per_block(SPEC, 3, 2, 4) == 10 * 4 * kv_bytes_per_token(SPEC, 3, 2)
    assert len(caches) == 3 and caches[0].keys.shape == (10, 2, 4, 16) and caches[0].block_size == 4
    assert all(not cache.values.any() for cache in caches)


def test_a_cache_takes_memory_only_where_it_is_used() -> None:
    import psutil

    before = psutil.Process().memory_info().rss
    caches = allocate_kv_tensors(SPEC, 1, 2**20, 4, torch.bfloat16, CPU)  # 512 MiB
    caches[0].keys[-1].fill_(1.0)
    assert psutil.Process().memory_info().rss - before < 2**26


def test_dtype_is_the_checkpoints_unless_asked_and_never_float16_on_a_cpu() -> None:
    assert resolve_dtype("auto", "bfloat16", CPU) == (torch.bfloat16, "")
    assert resolve_dtype("auto", "float32", CPU) == (torch.float32, "")
    assert resolve_dtype("float32", "bfloat16", CPU) == (torch.float32, "")
    for asked in ("auto", "float16"):
        dtype, note = resolve_dtype(asked, "float16", CPU)
        assert dtype == torch.bfloat16 and "bfloat16" in note
    assert resolve_dtype("auto", "float16", torch.device("cuda")) == (torch.float16, "")


def test_cuda_is_taken_when_there_is_one_and_refused_when_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == CPU
    with pytest.raises(ConfigError, match="--device is cuda"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [resolve_device("auto", stage) for stage in range(3)] == [torch.device("cuda", i) for i in (0, 1, 0)]
    assert resolve_device("cpu") == CPU


def test_free_memory_is_a_part_of_this_host() -> None:
    assert 0 < free_memory_bytes(CPU) <= psutil.virtual_memory().total


def test_free_memory_is_within_the_limit_of_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As set by `ulimit -v`: the machine may have more, and this process gets none of it."""
    taken = psutil.Process().memory_info().vms
    monkeypatch.setattr(resource, "getrlimit", lambda _: (taken + 2**24, resource.RLIM_INFINITY))
    assert 0 <= free_memory_bytes(CPU) <= 2**25
    monkeypatch.setattr(resource, "getrlimit", lambda _: (taken // 2, resource.RLIM_INFINITY))
    assert free_memory_bytes(CPU) == 0
