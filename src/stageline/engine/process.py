"""The engine's process from its first to its last words: `python -m stageline.engine.process FD`, started by its owner.

One idea, as with a stage's process: be answerable before anything that takes long. A thread shows signs of life, takes
the owner's orders, and ends the process when the owner is gone.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import logging
import os
import sys
import traceback
from collections import deque

import msgspec
import zmq
from msgspec.structs import replace

from stageline.checkpoint import open_checkpoint
from stageline.checkpoint.checkpoint import Checkpoint
from stageline.clock import Clock, MonotonicClock
from stageline.cluster.head import Head
from stageline.cluster.ray_fleet import BACKEND, RayFleet
from stageline.config import environment
from stageline.engine.engine_loop import EngineLoop
from stageline.engine.messages import (
    Drained,
    EngineFailed,
    EngineProcessConfig,
    EngineReady,
    ErrorReport,
    FromOwner,
    LoadProgress,
    PipelineDown,
    ToOwner,
    client_address,
    engine_address,
)
from stageline.engine.replica_places import take_place
from stageline.engine.responder import Responder
from stageline.engine.revival import Revival
from stageline.engine.startup import Pipeline, restart_pipeline, start_pipeline
from stageline.engine.stats import EngineFacts, StageFacts
from stageline.engine.warm_up import PROOF, USUAL_SIZES, warm_up
from stageline.errors import InternalError, StagelineError, StageUnfit, WorkerLost
from stageline.links.child_process import read_message, write_message
from stageline.links.frames import encode_message
from stageline.links.sockets import Links
from stageline.links.wakeup import Wakeup
from stageline.log import open_standard_streams, set_up_logging

logger = logging.getLogger("stageline.engine.process")

_RETRY_AFTER_S = 5.0
"""What clients are told when the pipeline is started again."""

_LAST_WORDS_S = 2.0
"""How long clients have to take them; one that is gone never will."""


def main() -> int:
    """Run an engine until it is told to stop. Returns: the exit status."""
    faulthandler.enable()
    config, owner_fd = _read_config()
    links = Links()
    clients = [links.sender(client_address(config.folder, index)) for index in range(config.num_clients)]
    engine = _Engine(config, links, clients, owner_fd)
    patience_s = 0.0
    try:
        set_up_logging(config.log_level)
        take_place(config.place)
        engine.run()
        return 0
    except BaseException as error:
        if not isinstance(error, StagelineError) or isinstance(error, InternalError):
            traceback.print_exception(error)
        engine.tell_all(EngineFailed(ErrorReport.of(error)))
        patience_s = _LAST_WORDS_S
        return 1
    finally:
        links.close(patience_s)


def _read_config() -> tuple[EngineProcessConfig, int]:
    body = read_message(sys.stdin.fileno())
    if body is None or len(sys.argv) != 2:
        sys.exit("the engine's process is started by its owner, not by hand")
    return msgspec.msgpack.decode(body, type=EngineProcessConfig), int(sys.argv[1])


class _Serving:
    """A pipeline that requests go through, and who takes them; the loop outlives the stages of one pipeline."""

    loop: EngineLoop

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline


class _Engine:
    """Loads, proves that it works, and serves."""

    def __init__(
        self, config: EngineProcessConfig, links: Links, clients: list[zmq.Socket[bytes]], owner_fd: int
    ) -> None:
        self._config = config
        self._links = links
        self._clients = clients
        self._owner_fd = owner_fd
        self._clock: Clock = MonotonicClock()
        self._orders: deque[FromOwner] = deque()

    def run(self) -> None:
        config = self._config
        incoming = self._links.receiver(engine_address(config.folder))
        responder = Responder(config, self._clock, self._orders)
        responder.start()
        checkpoint = open_checkpoint(config.model_path)
        fleet = self._place_by_ray()
        try:
            cluster, head = config.cluster if fleet is None else fleet.cluster, None
            if cluster is not None and cluster.is_spread:
                head = Head(config.engine, cluster, checkpoint, config.access, self._clock, fleet)
            self._run_pipelines(checkpoint, incoming, responder, head)
        finally:
            if fleet is not None:
                fleet.close()

    def _place_by_ray(self) -> RayFleet | None:
        """None if that was not asked for. Raises: ConfigError."""
        asked = self._config
        if asked.engine.distributed_executor_backend != BACKEND or asked.cluster is None:
            return None
        fleet = RayFleet(asked.engine, asked.cluster, asked.access)
        if fleet.own_gpus:
            environment.show_cuda_devices(fleet.own_gpus)
        # What Ray decides is decided: from here on it is a process per stage.
        self._config = replace(asked, engine=dataclasses.replace(asked.engine, distributed_executor_backend="mp"))
        return fleet

    def _run_pipelines(
        self, checkpoint: Checkpoint, incoming: zmq.Socket[bytes], responder: Responder, head: Head | None
    ) -> None:
        """One after the other, as long as each lost one may be started again."""
        revival, wakeup = Revival(self._config.revives), Wakeup()
        serving: _Serving | None = None
        try:
            while True:
                try:
                    if head is not None:
                        head.gather()
                    serving = self._bring_up(checkpoint, incoming, head, wakeup, serving)
                    responder.watch(serving.pipeline.core)
                    self.tell_all(EngineReady(serving.pipeline.layout.table))
                    revival.began_to_serve(self._clock.now_s())
                    while serving.loop.run_until_drained():
                        self._tell_owner(Drained())
                    return
                except (WorkerLost, StageUnfit) as error:
                    is_remote = head is not None and error.stage_index >= head.num_local
                    # What does not fit when everything begins is asked wrongly; later it may pass.
                    is_wrong = isinstance(error, StageUnfit) and serving is None
                    if is_wrong or not revival.allows(error, is_remote, self._clock.now_s()):
                        if revival.is_exhausted:
                            logger.error("it broke too often in a row and is given up: mend what its stages died of")
                        raise
                    loss = error if isinstance(error, WorkerLost) else WorkerLost(error.stage_index, error.reason)
                    responder.forget_core()
                    self._go_down(loss, serving, head.machine_of(loss.stage_index) if head is not None else "")
                    if (pause_s := revival.pause_s) > 0:
                        logger.info("it broke several times in a row: it is started again in %g s", pause_s)
                        responder.wait_for_order(pause_s)
        finally:
            if serving is not None:
                serving.pipeline.core.close()
            if head is not None:
                head.close()

    def _bring_up(
        self,
        checkpoint: Checkpoint,
        incoming: zmq.Socket[bytes],
        head: Head | None,
        wakeup: Wakeup,
        before: _Serving | None,
    ) -> _Serving:
        """The first pipeline, which proves that it works, or new stages for one that lost one."""
        engine, common = self._config.engine, (checkpoint, self._clock, self._on_progress)
        if before is not None:
            pipeline = restart_pipeline(before.pipeline, engine, *common, remote=head, wakeup=wakeup)
            pipeline.core.wake_on(incoming)
            before.pipeline = pipeline
            return before
        pipeline = start_pipeline(engine, *common, remote=head, wakeup=wakeup)
        try:
            self._warm_up(pipeline, checkpoint.spec.vocab_size)
        except BaseException:
            pipeline.core.close()
            raise
        # What loading left behind is for ever: the collector need not look at it again and again.
        gc.collect()
        gc.freeze()
        pipeline.core.wake_on(incoming)
        serving = _Serving(pipeline)
        serving.loop = EngineLoop(
            pipeline.core,
            engine,
            lambda: _facts(serving.pipeline, self._config),
            checkpoint.spec.vocab_size,
            self._clock,
            incoming,
            self._clients,
            self._orders,
        )
        return serving

    def _go_down(self, loss: WorkerLost, serving: _Serving | None, machine: str) -> None:
        """Args: machine: which one the stage was on, if not on this."""
        cluster = self._config.cluster
        keeps_requests = serving is not None and cluster is not None and cluster.on_worker_lost == "wait"
        when = " as soon as all machines are there" if machine else ""
        logger.error("%s; the pipeline is started again%s", loss, when)
        where = f", on {machine}," if machine else ""
        reason = f"stage {loss.stage_index} of the pipeline{where} was lost; it is started again{when}"
        if serving is not None:
            serving.loop.pipeline_lost(loss, keeps_requests)
        self.tell_all(PipelineDown(reason, _RETRY_AFTER_S, keeps_requests))

    def _warm_up(self, pipeline: Pipeline, vocab_size: int) -> None:
        rounds = (*PROOF, *(USUAL_SIZES if self._config.warms_up else ()))
        most = min(pipeline.max_model_len, pipeline.kv_plan.num_tokens)
        warm_up(pipeline.core, rounds, most, vocab_size, self._clock)

    def _on_progress(self, stage_index: int, num_bytes_read: int, num_bytes_total: int) -> None:
        self.tell_all(LoadProgress(stage_index, num_bytes_read, num_bytes_total))

    def tell_all(self, message: LoadProgress | EngineReady | PipelineDown | EngineFailed) -> None:
        frame = encode_message(message)
        for client in self._clients:
            client.send(frame)
        self._tell_owner(message)

    def _tell_owner(self, message: ToOwner) -> None:
        write_message(self._owner_fd, encode_message(message))


def _facts(pipeline: Pipeline, config: EngineProcessConfig) -> EngineFacts:
    plan, asked = pipeline.kv_plan, config.engine
    return EngineFacts(
        block_size=plan.block_size,
        num_blocks=plan.num_blocks,
        max_model_len=pipeline.max_model_len,
        max_num_seqs=asked.max_num_seqs,
        max_num_batched_tokens=asked.max_num_batched_tokens,
        enable_prefix_caching=asked.enable_prefix_caching,
        kv_plan=plan,
        stages=[
            StageFacts(
                stage_index=part.stage_index,
                first_layer=part.layers.start,
                end_layer=part.layers.stop,
                weight_bytes=report.weight_bytes,
                kv_bytes=kv.used_bytes,
            )
            for part, report, kv in zip(pipeline.partition, pipeline.reports, plan.stages, strict=True)
        ],
    )


if __name__ == "__main__":
    open_standard_streams()
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's farewell: nothing needs it, and libraries with threads of their own may trip over it.
    os._exit(status)
