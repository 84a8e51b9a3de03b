"""Trace files as they are published become the same requests, times and shared blocks; broken ones name their line."""

from __future__ import annotations

import pytest

from stageline.errors import ConfigError
from stageline.loadgen import traces

AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:18:03.9799600,110,27
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
45,ChatGPT,1087,110,1197,Conversation log
5,ChatGPT,472,18,490,Conversation log
118,GPT-4,417,0,417,Conversation log
118.5,GPT-4,200,7,207,API log
"""
MOONCAKE = """{"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2353]}
{"timestamp": 30535, "input_length": 600, "output_length": 26, "hash_ids": [46, 2366]}

{"timestamp": 30600, "input_length": 600, "output_length": 0, "hash_ids": [46, 9]}
"""
SHAREGPT = """[
 {"id": "a", "conversations": [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "12345678"}]},
 {"id": "b", "conversations": [{"from": "gpt", "value": "I begin"}, {"from": "human", "value": "no"}]},
 {"id": "c", "conversations": []},
 {"id": "d", "conversations": [{"from": "human", "value": "Bye"}, {"from": "gpt", "value": "x"}]}
]"""


def write(tmp_path, text: str) -> str:
    path = tmp_path / "trace"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_azure(tmp_path) -> None:
    rows = traces.read_azure(write(tmp_path, AZURE_2023))
    assert [(row.num_prompt_tokens, row.num_output_tokens) for row in rows] == [(4808, 10), (3180, 8), (110, 27)]
    assert [row.at_s for row in rows] == pytest.approx([0.0, 0.052, 60.0], abs=1e-6)
    assert len({segment.content for row in rows for segment in row.segments}) == 3


def test_azure_with_a_time_zone_and_a_byte_order_mark(tmp_path) -> None:
    rows = traces.read_azure(write(tmp_path, "\ufeff" + AZURE_2024))
    assert [row.at_s for row in rows] == pytest.approx([0.0, 0.007405], abs=1e-6)


def test_burstgpt_in_order_of_time_without_failed_requests(tmp_path) -> None:
    rows = traces.read_burstgpt(write(tmp_path, BURSTGPT))
    assert [(row.at_s, row.num_prompt_tokens, row.num_output_tokens) for row in rows] == [
        (0.0, 472, 18), (40.0, 1087, 110), (113.5, 200, 7)
    ]  # fmt: skip


def test_mooncake_shares_the_blocks_that_share_a_hash(tmp_path) -> None:
    first, second = traces.read_mooncake(write(tmp_path, MOONCAKE))
    assert [(segment.num_tokens, segment.content) for segment in first.segments] == [(512, 46), (512, 47), (76, 2353)]
    assert [(segment.num_tokens, segment.content) for segment in second.segments] == [(512, 46), (88, 2366)]
    assert (first.at_s, second.at_s) == (0.0, pytest.approx(3.053))


def test_mooncake_without_enough_hashes_keeps_its_length(tmp_path) -> None:
    [row] = traces.read_mooncake(
        write(tmp_path, '{"timestamp": 1, "input_length": 900, "output_length": 5, "hash_ids": [3]}')
    )
    assert row.num_prompt_tokens == 900 and row.segments[0].content == 3 != row.segments[1].content


def test_sharegpt_takes_what_people_asked_first(tmp_path) -> None:
    rows = traces.read_sharegpt(write(tmp_path, SHAREGPT))
    assert [(row.text, row.num_output_tokens) for row in rows] == [("Hello?", 2), ("Bye", 1)]


@pytest.mark.parametrize(
    ("read", "text"),
    [(traces.read_azure, AZURE_2023), (traces.read_mooncake, MOONCAKE), (traces.read_sharegpt, SHAREGPT)],
)
def test_no_more_than_wanted_are_read(tmp_path, read, text) -> None:
    assert len(read(write(tmp_path, text), 1)) == 1


@pytest.mark.parametrize(
    ("read", "text", "told"),
    [
        (traces.read_azure, "a,b\n1,2\n", "'TIMESTAMP'"),
        (traces.read_azure, AZURE_2023 + "2023-11-16 18:19:00,many,3\n", "line 5.*many"),
        (traces.read_azure, AZURE_2023 + "yesterday,3,3\n", "line 5.*yesterday"),
        (traces.read_azure, "TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
        (traces.read_burstgpt, BURSTGPT + "119,GPT-4\n", "line 6"),
        (traces.read_mooncake, MOONCAKE + "{}\n", "line 5.*timestamp"),
        (traces.read_mooncake, "not json", "line 1"),
        (traces.read_sharegpt, "{}", "no list of conversations"),
        (traces.read_sharegpt, "[]", "no conversation"),
        (traces.read_azure, None, "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(tmp_path, read, text, told) -> None:
    path = str(tmp_path / "nowhere") if text is None else write(tmp_path, text)
    with pytest.raises(ConfigError, match=told):
        read(path)
