"""Where the cluster key is kept, and where a process finds it: a flag's file, a variable, or a variable's file."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from stageline.config import environment
from stageline.errors import ConfigError
from stageline.links.keys import ClusterKey, LinkSecurity

FLAG = "--cluster-key-file"
_MOST_BYTES = 4096
_OWNER_ONLY = 0o600


def given_security(key_file: str | None, is_insecure: bool) -> LinkSecurity | None:
    """How TCP links are protected, from the flags and the environment.

    Args:
        key_file: of `--cluster-key-file`.
        is_insecure: `--insecure` was typed; a key that is there is used all the same.
    Returns: None without either: links then stay on loopback addresses.
    Raises: ConfigError.
    """
    key = given_key(key_file)
    return LinkSecurity(key) if key is not None or is_insecure else None


def given_key(key_file: str | None) -> ClusterKey | None:
    """The key of `--cluster-key-file`, STAGELINE_CLUSTER_KEY or STAGELINE_CLUSTER_KEY_FILE; None if none is set.

    The flag wins over the variables. Raises: ConfigError.
    """
    if key_file is not None:
        return read_key(key_file, FLAG)
    text, file = environment.cluster_key(), environment.cluster_key_file()
    if text is not None and file is not None:
        raise ConfigError(f"{text.name} and {file.name} are both set; unset one, so that it is clear which key counts")
    if text is not None:
        return ClusterKey.parse(text.value, text.name)
    return None if file is None else read_key(file.value, file.name)


def read_key(path: str, source: str) -> ClusterKey:
    """The key of a file that only its owner, and at most its group, can read.

    Args:
        source: the flag or variable that names the file, for messages.
    Raises: ConfigError.
    """
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_MOST_BYTES)
    except OSError as error:
        raise ConfigError(
            f"{source} {path} cannot be read: {error.strerror or error}; `stageline key new --out {path}` makes a key, "
            "the same file has to be on every machine"
        ) from None
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise ConfigError(
            f"{source} {path} has mode {stat.S_IMODE(mode):04o}: others than its owner can use the key; "
            f"type: chmod 600 {path}"
        )
    return ClusterKey.parse(content.decode("utf-8", "replace"), f"{source} {path}")


def write_new_key(path: str) -> ClusterKey:
    """Make a key and a file for it that only its owner can read. Raises: ConfigError if there is such a file."""
    key = ClusterKey.new()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _OWNER_ONLY)
    except FileExistsError:
        raise ConfigError(
            f"--out {path} exists, and a key is never overwritten: nodes that have it would be locked out; give "
            "another file, or remove this one first"
        ) from None
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror or error}") from None
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(key.text() + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        with suppress(OSError):
            os.unlink(path)
        raise ConfigError(f"--out {path} cannot be written: {error.strerror or error}") from None
    return key
