"""`serve`: from what was asked for to a running server. One idea: what can be known to be wrong is refused first.

Nothing is started, and no client can connect, before flags, port, keys, certificate and model are found to be in order.
"""

from __future__ import annotations

import time

from stageline.checkpoint import open_checkpoint
from stageline.checkpoint.tokenizer import load_tokenizer
from stageline.cluster.ray_fleet import BACKEND, check_ray, ray_access
from stageline.cluster.start import check_head, check_replicas, link_access
from stageline.config.cluster_config import ClusterConfig
from stageline.config.engine_config import EngineConfig
from stageline.config.serve_config import ServeConfig
from stageline.engine.replica_places import Machine, divide
from stageline.engine.startup import check_before_start
from stageline.server.answer_parsing import choose_answer_style
from stageline.server.listening_socket import BACKLOG, bind, url_of
from stageline.server.preflight import check_open_files, make_ssl_context, with_all_api_keys
from stageline.server.supervisor import Supervisor


def serve(engine: EngineConfig, serve: ServeConfig, cluster: ClusterConfig | None = None) -> None:
    """Serve until told to stop by a signal.

    Args:
        cluster: which machines take part; None is this one alone.
    Raises: ConfigError before anything starts; WorkerLost, EngineLost, InternalError when something broke.
    """
    began_s = time.monotonic()
    config = with_all_api_keys(serve.check())
    tls = make_ssl_context(config)
    cluster = (cluster or ClusterConfig()).check()
    is_by_ray = engine.distributed_executor_backend == BACKEND
    if is_by_ray:
        check_ray(engine, cluster)
    access = (ray_access if is_by_ray else link_access)(cluster, is_insecure=config.insecure)
    with bind(config) as listening:
        if not is_by_ray:
            check_head(engine, cluster, access, api_port=listening.getsockname()[1])
        check_replicas(config.data_parallel_size, cluster, is_by_ray)
        check_open_files(engine.pipeline_parallel_size * config.data_parallel_size)
        checkpoint = open_checkpoint(engine.check().model)
        check_before_start(engine, checkpoint)
        replicas = divide(engine, config.data_parallel_size, Machine.here())
        tokenizer = load_tokenizer(checkpoint, engine.tokenizer, engine.chat_template)
        choose_answer_style(tokenizer, config, config.served_model_name)
        listening.listen(BACKLOG)
        url = url_of(listening, is_tls=tls is not None)
        Supervisor(replicas, config, checkpoint.path, listening, url, began_s, cluster, access).run()
