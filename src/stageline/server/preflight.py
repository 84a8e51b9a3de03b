"""What can be known to be wrong before a process starts: keys, certificates, open files.

One line each, with the way out.
"""

from __future__ import annotations

import dataclasses
import logging
import resource
import ssl
import stat
from pathlib import Path

from stageline.config import environment
from stageline.config.serve_config import ServeConfig
from stageline.errors import ConfigError

logger = logging.getLogger(__name__)

_FEWEST_FILES = 48
_FEWEST_FILES_PER_STAGE = 8


def check_open_files(num_stages: int) -> None:
    """Let this process and its children have open files enough for a few connections; more are asked for later.

    Raises: ConfigError if the system does not allow it.
    """
    fewest = _FEWEST_FILES + _FEWEST_FILES_PER_STAGE * num_stages
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < fewest:
        raise ConfigError(f"a process may have {most} open files, and this server needs {fewest}; ulimit -n {fewest}")
    if allowed != resource.RLIM_INFINITY and allowed < fewest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (fewest, most))


def with_all_api_keys(config: ServeConfig) -> ServeConfig:
    """`config` with the keys of its file and of the environment in `api_key`, beside those of the flags.

    Raises: ConfigError if the file cannot be read or holds no key.
    """
    keys = [*config.api_key, *environment.api_keys()]
    if config.api_key_file is not None:
        keys += _keys_of_file(Path(config.api_key_file))
    return dataclasses.replace(config, api_key=tuple(dict.fromkeys(keys)), api_key_file=None).check()


def _keys_of_file(path: Path) -> list[str]:
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--api-key-file {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--api-key-file {path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    lines = (line.strip() for line in text.splitlines())
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file {path} holds no key; write one per line")
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        logger.warning("--api-key-file %s can be read by other users; chmod 600 %s keeps the keys secret", path, path)
    return keys


def make_ssl_context(config: ServeConfig) -> ssl.SSLContext | None:
    """What TLS needs, or None if it is not asked for. Raises: ConfigError for files that cannot work together."""
    if config.ssl_certfile is None:
        return None
    for flag, path in (("--ssl-certfile", config.ssl_certfile), ("--ssl-keyfile", config.ssl_keyfile)):
        if path is not None:
            _check_readable(flag, path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=_refuse_password)
    except ssl.SSLError as error:
        raise ConfigError(_words_for(config, error)) from None
    return context


def _check_readable(flag: str, path: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror or error}") from None


def _refuse_password() -> str:
    """Asking on the terminal, as the library would, stops a service that has none."""
    raise ConfigError("the TLS key is protected by a password; give one without, such as by openssl pkey -in KEY")


def _words_for(config: ServeConfig, error: ssl.SSLError) -> str:
    certificate = config.ssl_certfile
    key = config.ssl_keyfile or certificate
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"the key in {key} is not that of the certificate in {certificate}; give files that belong together"
    reason = error.reason or str(error)
    return f"TLS cannot use certificate {certificate} with key {key}: {reason}; both must be PEM files"
