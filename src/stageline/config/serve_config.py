"""Everything an operator can ask of the server around the engine, with the defaults and the words of `--help`."""

from __future__ import annotations

from dataclasses import dataclass

from stageline.config.settings import at_least, check_types, flag_of, setting
from stageline.errors import ConfigError

HIGHEST_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """What was asked for. `check()` refuses what cannot work on any machine; the rest is checked where it is known.

    A process that answers requests gets it with `api_key` holding every key that is valid, from flags, file and
    environment alike; it has no need to look elsewhere.
    """

    host: str = setting(
        "127.0.0.1", "address to listen on: one of this machine's, by number or name; any but a loopback address needs "
        "an API key, or --insecure", group="network",
    )
    port: int = setting(8000, "TCP port to listen on; 0 takes any that is free", group="network", metavar="PORT")
    insecure: bool = setting(
        False, "listen on an address that others can reach without asking them for a key", group="network"
    )
    ssl_certfile: str | None = setting(
        None, "serve HTTPS with this certificate (PEM, with its chain)", group="network", metavar="FILE"
    )
    ssl_keyfile: str | None = setting(
        None, "the certificate's private key (PEM; default: in the certificate's file)", group="network", metavar="FILE"
    )
    root_path: str = setting(
        "", "path under which a proxy in front shows this server, such as /llm", group="network", metavar="PATH"
    )
    api_server_count: int = setting(
        1, "processes that read and answer HTTP, all on the same port", group="network", metavar="PROCESSES"
    )
    data_parallel_size: int = setting(
        1, "number of equal pipelines that share the requests: each goes to one that computed its beginning before, if "
        "that is not much busier than another; they share this machine's cores or GPUs evenly", flags=("-dp",),
        group="replicas", metavar="REPLICAS",
    )

    api_key: tuple[str, ...] = setting(
        (), "key that clients must send as a bearer token; may be repeated, or a list with commas. The variable "
        "STAGELINE_API_KEY does the same, and is not shown by ps", group="access", metavar="KEY", is_secret=True,
    )
    api_key_file: str | None = setting(
        None, "file with one more key per line; lines that begin with # are comments", group="access", metavar="FILE"
    )
    allowed_origins: tuple[str, ...] = setting(
        (), "web origins whose pages may call this server from a browser (CORS), such as https://chat.example.org, or "
        "*; may be repeated, or a list with commas (default: none)", group="access", metavar="ORIGIN",
    )

    served_model_name: tuple[str, ...] = setting(
        (), "name that clients call the model by; may be repeated, or a list with commas: all are accepted, the first "
        "is shown (default: MODEL as typed)", group="API", metavar="NAME",
    )
    tool_call_parser: str = setting(
        "auto", "how the model writes tool calls; auto tells it from its chat template, none looks for none",
        group="API", metavar="STYLE",
    )
    reasoning_parser: str = setting(
        "auto", "how the model marks its reasoning; auto tells it from its chat template, none separates none",
        group="API", metavar="STYLE",
    )
    enable_request_id_headers: bool = setting(
        True, "take a request's id from its X-Request-Id header, and return it in the answer's", group="API"
    )
    disable_log_requests: bool = setting(False, "do not log a line per answered request", group="API")

    warmup: bool = setting(
        False, "run requests of several sizes before the server is ready, so that the first users wait no longer than "
        "later ones (one token goes through all stages in any case)", group="limits",
    )
    request_timeout_s: float | None = setting(
        None, "longest time a request may take, waiting included (default: any)", group="limits", metavar="SECONDS"
    )
    read_timeout_s: float = setting(
        30.0, "longest time from a connection's or a request's first byte to its last", group="limits",
        metavar="SECONDS",
    )
    keep_alive_timeout_s: float = setting(
        75.0, "a connection without a request for this long is closed", group="limits", metavar="SECONDS"
    )
    write_timeout_s: float = setting(
        120.0, "a client that takes nothing of its answer for this long is cut off", group="limits", metavar="SECONDS"
    )
    drain_timeout_s: float = setting(
        30.0, "after SIGTERM, running requests have this long to finish", group="limits", metavar="SECONDS"
    )
    max_body_bytes: int = setting(16 * 2**20, "largest body of a request", group="limits", metavar="BYTES")
    max_header_bytes: int = setting(
        64 * 2**10, "longest request line and headers of a request, together", group="limits", metavar="BYTES"
    )
    max_connections: int = setting(
        4096, "most connections of one API process; those without a request give way to further ones", group="limits",
        metavar="CONNECTIONS",
    )

    def check(self) -> ServeConfig:
        """Return self, or raise ConfigError naming the first setting that cannot work."""
        check_types(self)
        self._check_network()
        for name in ("api_key", "allowed_origins", "served_model_name"):
            if any(not item.strip() for item in getattr(self, name)):
                raise ConfigError(f"{flag_of(name)} has an empty entry; give a value or leave the flag out")
        if any(not (key.isascii() and key.isprintable()) or " " in key for key in self.api_key):
            raise ConfigError("--api-key must be of printable ASCII characters without spaces: a header carries it")
        for name in ("read_timeout_s", "write_timeout_s", "keep_alive_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{flag_of(name)} is {getattr(self, name)}; it must be above 0 seconds")
        if self.request_timeout_s is not None and not self.request_timeout_s > 0:
            raise ConfigError(
                f"--request-timeout-s is {self.request_timeout_s}; it must be above 0 seconds, or left out for none"
            )
        if not self.drain_timeout_s >= 0:
            raise ConfigError(f"--drain-timeout-s is {self.drain_timeout_s}; it must be at least 0 seconds")
        at_least("max_body_bytes", self.max_body_bytes, 1024)
        at_least("max_header_bytes", self.max_header_bytes, 1024)
        at_least("max_connections", self.max_connections, 1)
        return self

    def _check_network(self) -> None:
        if not self.host.strip():
            raise ConfigError("--host is empty; give an address of this machine, such as 127.0.0.1")
        if not 0 <= self.port <= HIGHEST_PORT:
            raise ConfigError(f"--port is {self.port}; it must be between 0 and {HIGHEST_PORT}")
        at_least("api_server_count", self.api_server_count, 1)
        at_least("data_parallel_size", self.data_parallel_size, 1)
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("--ssl-keyfile is given without --ssl-certfile; give both, or neither for plain HTTP")
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError(f"--root-path is {self.root_path!r}; it must begin with /, as /llm does")
