"""Models whose weights stay quantised: near the dequantised one, the same at every depth, refused where senseless."""

from __future__ import annotations

import math
from pathlib import Path
from pydoc_data.topics import topics

import gguf
import numpy as np
import pytest
import torch

from stageline import LLM, SamplingParams
from stageline.checkpoint import open_checkpoint, stage_weight_bytes
from stageline.checkpoint.encodings import PACKED_BLOCK_BYTES
from stageline.config.engine_config import EngineConfig
from stageline.engine.startup import check_quantization
from stageline.errors import ConfigError
from stageline.kernels.huge_pages import HugePages
from stageline.kernels.quantized import QuantizedMatrix
from stageline.weights.quantized import pack_matrix
from stageline.weights.reader import CheckpointReader
from tests.model.chain import Chain, cut, sequence
from tests.model.quantized_blocks import random_blocks
from tests.tiny_models import TinyModel

CPU = torch.device("cpu")
HIDDEN, SIZE, VOCAB, HEADS, KV_HEADS, NUM_LAYERS = 256, 512, 320, 4, 2, 3
HEAD_DIM = HIDDEN // HEADS
SHAPES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (SIZE, HIDDEN),
    "ffn_up": (SIZE, HIDDEN),
    "ffn_down": (HIDDEN, SIZE),
}
# Every kept type, side by side with others, and with one that has to become floating-point (Q5_1).
TYPES = [
    dict(zip(SHAPES, ("Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q4_K", "Q6_K"), strict=True)),
    dict(zip(SHAPES, ("Q4_0", "Q8_0", "Q4_1", "MXFP4", "Q4_0", "Q4_1", "Q4_1"), strict=True)),
    dict(zip(SHAPES, ("Q5_1", "Q8_0", "Q5_1", "Q5_0", "Q5_1", "Q4_0", "Q8_0"), strict=True)),
]


def write_mixed_model(path: Path, is_tied: bool) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(SIZE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    seed = 0

    def add(name: str, kind: str, rows: int, columns: int) -> None:
        nonlocal seed
        seed += 1
        deviation = 1.0 if name == "token_embd" else 1.5 * columns**-0.5
        blocks = random_blocks(kind, rows, columns, deviation, seed)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType[kind])

    add("token_embd", "Q8_0", VOCAB, HIDDEN)
    if not is_tied:
        add("output", "Q6_K", VOCAB, HIDDEN)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, dtype=np.float32))
    for layer, types in enumerate(TYPES):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(HIDDEN, dtype=np.float32))
        for name, kind in types.items():
            add(f"blk.{layer}.{name}", kind, *SHAPES[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def mixed_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixed_model(tmp_path_factory.mktemp("mixed") / "model.gguf", request.param)


def logits_of(path: Path, cuts: list[range], tokens: list[int], chunks: list[int], **options: object) -> torch.Tensor:
    chain = Chain(path, cuts, **options)  # type: ignore[arg-type]
    chain.requests.add(0, tokens)
    return torch.cat([chain.run({0: size})[0] for size in chunks])


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_every_type_beside_every_other_is_close_to_the_dequantised_model(mixed_model: Path) -> None:
    """Rounding a normal variable to eight bits per block of 32 costs about 0.5 % per product; 7 products a layer in 3
    layers and a head add up to about 2.5 %. A wrong row, scale or order of heads costs 100 %."""
    tokens = sequence(0, 40)
    exact = logits_of(mixed_model, cut(3), tokens, [40])
    found = logits_of(mixed_model, cut(3), tokens, [40], keeps_quantized=True)
    assert 1e-4 < relative_error(found, exact) < 0.04


@pytest.mark.skipif(
    torch.cpu._is_amx_tile_supported(), reason="oneDNN multiplies what is not quantised, in its own way"
)
def test_depth_and_chunks_do_not_change_a_bit(mixed_model: Path) -> None:
    tokens = sequence(1, 40)
    options = {"dtype": torch.bfloat16, "keeps_quantized": True}
    whole = logits_of(mixed_model, cut(3), tokens, [40], **options)
    cut_up = logits_of(mixed_model, cut(1, 1, 1), tokens, [7, 30, 1, 1, 1], **options)
    assert torch.equal(cut_up, whole)


def test_kept_types_stay_quantised_and_memory_is_what_the_report_says(mixed_model: Path) -> None:
    checkpoint = open_checkpoint(str(mixed_model))
    kept, num_bytes = set(), 0
    with CheckpointReader(checkpoint, torch.bfloat16, CPU, keeps_quantized=True) as reader:
        for name, entry in checkpoint.tensors.items():
            weight = reader.read_matrix(name, entry.shape) if len(entry.shape) == 2 else reader.read(name, entry.shape)  # type: ignore[arg-type]
            is_kept = isinstance(weight, QuantizedMatrix)
            assert is_kept == (entry.encoding in set(PACKED_BLOCK_BYTES)), name
            kept.add(entry.encoding) if is_kept else None
            num_bytes += weight.num_bytes if isinstance(weight, QuantizedMatrix) else 2 * weight.numel()
    assert kept == set(PACKED_BLOCK_BYTES)
    assert num_bytes == stage_weight_bytes(checkpoint, range(NUM_LAYERS), True, True, 2, keeps_quantized=True)


def test_rows_of_the_kept_embedding_are_the_dequantised_ones(mixed_model: Path) -> None:
    checkpoint = open_checkpoint(str(mixed_model))
    name = "model.embed_tokens.weight"
    with CheckpointReader(checkpoint, torch.float32, CPU, keeps_quantized=True) as reader:
        matrix = reader.read_matrix(name, (VOCAB, HIDDEN))
        assert isinstance(matrix, QuantizedMatrix)
        places = torch.tensor(sequence(3, 50, VOCAB))
        assert torch.equal(matrix.rows(places), reader.read(name, (VOCAB, HIDDEN))[places])


@pytest.mark.parametrize("kind", PACKED_BLOCK_BYTES)
def test_rows_in_another_order_are_the_same_rows(kind: str) -> None:
    data = torch.from_numpy(random_blocks(kind, 100, 256, 1.0, seed=5))
    matrix = pack_matrix(data, kind, HugePages())
    assert matrix is not None
    before = matrix.rows(torch.arange(100))
    order = torch.randperm(100, generator=torch.Generator().manual_seed(6))
    matrix.reorder_rows(order)
    assert torch.equal(matrix.rows(torch.arange(100)), before[order])


SETTINGS = {"distributed_executor_backend": "in_process", "max_model_len": 1024, "kv_cache_memory": "128MiB"}


@pytest.fixture(scope="module")
def quantized_llm(smollm2_gguf: Path) -> LLM:
    return LLM(str(smollm2_gguf), quantization="int8", **SETTINGS)


def test_smollm2_answers_sensibly(quantized_llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    answer = quantized_llm.chat([question], SamplingParams(temperature=0, max_tokens=20))[0].outputs[0].text
    assert "Paris" in answer


def test_a_request_s_tokens_do_not_depend_on_the_others(quantized_llm: LLM) -> None:
    prompts = [f"Story number {number}: once upon a time" for number in range(7)]
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    together = quantized_llm.generate(prompts, greedy, use_tqdm=False)
    alone = [quantized_llm.generate([prompt], greedy, use_tqdm=False)[0] for prompt in prompts]
    assert [r.outputs[0].token_ids for r in together] == [r.outputs[0].token_ids for r in alone]


def test_perplexity_is_within_one_per_cent_of_the_dequantised_model(smollm2_gguf: Path, quantized_llm: LLM) -> None:
    """Some thousand tokens: the measured difference is 0.3 %, and fewer would add as much by chance."""
    token_ids = quantized_llm.tokenizer.encode("\n".join(topics[name] for name in ("import", "with", "debugger")))
    prompts = [token_ids[begin : begin + 1000] for begin in range(0, 4000, 1000)]
    with LLM(str(smollm2_gguf), **SETTINGS) as dequantised:
        expected = perplexity(dequantised, prompts)
    assert perplexity(quantized_llm, prompts) == pytest.approx(expected, rel=0.01)


def perplexity(llm: LLM, prompts: list[list[int]]) -> float:
    logprobs = []
    for output in llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False):
        assert output.prompt_logprobs is not None
        told = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        logprobs += [of_token[token_id].logprob for token_id, of_token in told if of_token is not None]
    return math.exp(-sum(logprobs) / len(logprobs))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quantization": "int3"}, "--quantization is 'int3'; choose from none, int8"),
        ({"quantization": "int8", "device": "cuda"}, "--device is cuda; give --device cpu or --quantization none"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(model="m", **settings).check()  # type: ignore[arg-type]


def test_checkpoints_without_quantised_weights_are_refused(tmp_path: Path) -> None:
    directory = TinyModel().write(tmp_path / "directory")
    config = EngineConfig(model="m", quantization="int8")
    with pytest.raises(ConfigError, match=r"directory are of type F32, .* GGUF file of such a type \(MXFP4, .*AWQ"):
        check_quantization(config, open_checkpoint(str(directory)))
    checkpoint = open_checkpoint(str(write_mixed_model(tmp_path / "model.gguf", is_tied=True)))
    check_quantization(config, checkpoint)
    unsupported = {n: e for n, e in checkpoint.tensors.items() if e.encoding in ("Q5_1", "F32")}
    with pytest.raises(ConfigError, match=r"the matrices of .* are of type Q5_1, none of which it can keep"):
        check_quantization(config, type(checkpoint)(checkpoint.path, checkpoint.spec, unsupported))
