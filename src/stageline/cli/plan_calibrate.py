"""`stageline plan [MODEL] --calibrate`: measure this host in less than a minute, and keep what was found."""

from __future__ import annotations

import argparse
import sys
import time

from stageline.cli.opening import written
from stageline.config.engine_config import EngineConfig
from stageline.cost.host_profile import HostProfile, save_host_profile
from stageline.planner.calibrate import calibrate_host
from stageline.planner.known_models import find_model

DEFAULT_MODEL = "smollm2-135m"
_SHOWN_TOKENS = (1, 8, 32, 128, 512)


def run_calibration(args: argparse.Namespace) -> int:
    """Returns: the exit status, 1 if the profile could not be kept. Raises: ConfigError."""
    model = find_model(args.model or DEFAULT_MODEL)
    start_s = time.monotonic()
    profile = calibrate_host(EngineConfig(model=model.name), model.spec, _say)
    print(f"{format_profile(profile)}\nmeasured in {time.monotonic() - start_s:.0f} s")
    path = profile.key.path
    if not written("--calibrate: the profile", str(path), lambda: save_host_profile(profile)):
        return 1
    print(f"profile: {path}; `stageline plan MODEL --simulate` uses it from now on")
    return 0


def format_profile(profile: HostProfile) -> str:
    """What was measured, in a few lines; no newline at the end."""
    key, shape, run, crowded = profile.key, profile.shape, profile.run, profile.crowded_run
    shares = zip(crowded.core_share.factors, crowded.core_share.tokens, strict=True)
    cores_had = ", ".join(f"{share:.0%} with {tokens} rows" for share, tokens in shares)
    rates = ", ".join(
        f"{tokens} rows {profile.matmul_flops_per_s(tokens) / 1e9:.0f} GFLOP/s" for tokens in _SHOWN_TOKENS
    )
    attention = shape.kv_bytes_per_token / profile.attention_token_s
    slowdowns = "; ".join(
        f"{number} at once " + ", ".join(f"{rows} rows {contention.at(rows):.2f}" for rows in _SHOWN_TOKENS[:4])
        for number, contention in enumerate(profile.contention, start=2)
    )
    engine_s = profile.engine.launch_s + profile.engine.result_s + profile.engine.news_s
    return "\n".join(
        [
            f"{key.machine}, {key.num_cores} cores, {key.threads_per_stage} a stage, {key.dtype}",
            f"matrix products, one stage:  {rates}",
            f"weights are read at          {profile.memory_bytes_per_s / 1e9:.1f} GB/s",
            f"a decode reads its cache at  {attention / 1e9:.1f} GB/s",
            f"slower with several stages:  {slowdowns or 'there are no cores for several'}",
            f"a microbatch costs besides   {(profile.stage_s + run.prepare_s + run.begin_s) * 1e6:.0f} µs on a stage, "
            f"{engine_s * 1e6:.0f} µs in the engine",
            f"sending takes a stage        {run.send_s * 1e6:.0f} µs, a result {run.result_send_s * 1e6:.0f} µs, "
            f"tokens to the first one {run.hand_on_s * 1e6:.0f} µs",
            f"a message is under way for   {run.to_stages_s * 1e6:.0f} µs to a stage, "
            f"{run.to_next_stage_s * 1e6:.0f} µs between stages, {run.to_engine_s * 1e6:.0f} µs to the engine",
            f"large messages go at         {profile.link_bytes_per_s / 1e9:.1f} GB/s",
            f"one request, several stages  computing takes {run.work.at(1):.2f} times as long as on one",
            f"more stages than cores       one token takes {crowded.work.at(1):.2f} times as long, messages "
            f"{crowded.to_next_stage_s * 1e6:.0f} µs; of the cores are had {cores_had}",
        ]
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
