"""`/metrics` for Prometheus and `/load` for routers: the engine's statistics, whichever API process is asked.

One idea: both answer at any time. While the model loads, or after a stage was lost, they tell what is left to tell.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stageline.engine.stats import EngineStats
from stageline.errors import StagelineError
from stageline.server.errors import JSON
from stageline.server.exposition import Exposition, engine_families
from stageline.server.http_counters import API_PROCESS, HttpCounters
from stageline.server.operations import Operation
from stageline.server.routing import endpoint
from stageline.server.state import ServerState

logger = logging.getLogger(__name__)

_PLAIN = "text/plain; version=0.0.4; charset=utf-8"
_PATIENCE_S = 5.0
"""How long the engine may take to answer; a scrape usually gives up after ten seconds."""


class Load(msgspec.Struct, kw_only=True):
    """How busy the pipeline is.

    Args:
        server_load: requests running and waiting; all API processes tell the same.
        kv_cache_usage: the share of the KV cache in use.
        is_ready: false while the model loads or if a stage is lost; the numbers are 0 then.
    """

    server_load: int = 0
    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_waiting_tokens: int = 0
    max_num_seqs: int = 0
    kv_cache_usage: float = 0.0
    microbatches_in_flight: int = 0
    is_ready: bool = False


OPERATIONS = [
    Operation("GET", "/metrics", "Metrics for Prometheus", tag="server", answer_type="text/plain"),
    Operation("GET", "/load", "How busy the pipeline is", tag="server", answer=Load),
]


def routes(state: ServerState, counters: HttpCounters) -> list[Route]:
    """Args:
    counters: what this process answers over HTTP.
    """

    async def metrics(state: ServerState, _http: Request) -> Response:
        return await show_metrics(state, counters)

    return [
        Route("/metrics", endpoint(state, metrics), methods=["GET"]),
        Route("/load", endpoint(state, show_load), methods=["GET"]),
    ]


async def show_metrics(state: ServerState, counters: HttpCounters) -> Response:
    """Always in the plain format: the writer of the newer one would turn the colons of our names into underscores."""
    stats = await _stats(state)
    name = state.model_names[0]
    families = engine_families(stats, name)
    families += [*ready_families(name, len(stats)), *process_families(), *counters.families()]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return Response(generate_latest(registry), headers={"Content-Type": _PLAIN})


async def show_load(state: ServerState, _http: Request) -> Response:
    stats = await _stats(state)
    return Response(msgspec.json.encode(_load(list(stats.values()))), media_type=JSON)


def _load(stats: list[EngineStats]) -> Load:
    """Of all replicas together."""
    if not stats:
        return Load()
    schedulers = [one.scheduler for one in stats]
    num_running, num_waiting = (sum(one.num_running for one in schedulers), sum(one.num_waiting for one in schedulers))
    return Load(
        server_load=num_running + num_waiting,
        num_requests_running=num_running,
        num_requests_waiting=num_waiting,
        num_waiting_tokens=sum(one.num_waiting_tokens for one in schedulers),
        max_num_seqs=sum(one.facts.max_num_seqs for one in stats),
        kv_cache_usage=sum(one.num_used_blocks for one in schedulers) / sum(one.num_blocks for one in schedulers),
        microbatches_in_flight=sum(len(one.microbatches.in_flight_rows) for one in stats),
        is_ready=True,
    )


async def _stats(state: ServerState) -> dict[int, EngineStats]:
    """Of every replica that has some to give; of one that is silent nothing is to be waited for."""
    replicas = state.llm.healthy_replicas
    answers = await asyncio.gather(*(_stats_of(state, replica) for replica in replicas))
    return {replica: stats for replica, stats in zip(replicas, answers, strict=True) if stats is not None}


async def _stats_of(state: ServerState, replica: int) -> EngineStats | None:
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return await state.llm.stats(replica)
    except TimeoutError:
        logger.warning("the engine did not tell its statistics within %g s", _PATIENCE_S)
    except StagelineError as error:
        logger.warning("the engine has no statistics: %s", str(error).splitlines()[0])
    return None


def ready_families(model_name: str, num_ready: int) -> list[Metric]:
    """What there is to tell also while the engine tells nothing."""
    page = Exposition({"model_name": model_name})
    page.gauge("stageline:ready", "Whether the engine answers, or one of several.", 1 if num_ready else 0)
    page.gauge("stageline:engines_ready", "Engines that answer.", num_ready)
    return page.families


def process_families() -> list[Metric]:
    """CPU time and memory of this process, under the names that Prometheus knows."""
    families = list(ProcessCollector(registry=CollectorRegistry()).collect())
    for family in families:
        family.samples = [one._replace(labels=one.labels | API_PROCESS) for one in family.samples]
    return families


class _Families:
    """Metrics as a registry takes them."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families
