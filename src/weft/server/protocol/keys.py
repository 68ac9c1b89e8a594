"""The keys of a job: who has them may join it, read its weights and push gradients; nobody else gets a connection.

One file per job holds two CURVE key pairs (elliptic-curve encryption of ZeroMQ, as in CurveCP): that of the servers and
that of the workers. A worker accepts only a server with the first, a server only workers with the second, and all that
passes between them is encrypted. The file is for its owner alone (mode 600), and is refused otherwise.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.errors import LaunchError

KEY_BYTES = 40
"""Of a key as text (Z85)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobKey:
    """Both key pairs, as text."""

    server_public: str
    server_secret: str
    worker_public: str
    worker_secret: str

    def __repr__(self) -> str:
        return f"JobKey({self.server_public[:6]}…)"


def make_key() -> JobKey:
    """A new key."""
    import zmq

    (server_public, server_secret), (worker_public, worker_secret) = zmq.curve_keypair(), zmq.curve_keypair()
    return JobKey(
        server_public=server_public.decode(),
        server_secret=server_secret.decode(),
        worker_public=worker_public.decode(),
        worker_secret=worker_secret.decode(),
    )


def write_key(path: Path) -> JobKey:
    """A new key in a new file, which nobody else can read at any time."""
    key = make_key()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise LaunchError(f"{path} exists already; remove it, or use it as the job's key") from None
    except OSError as error:
        raise LaunchError(f"cannot write the job's key to {path}: {error.strerror}") from None
    with os.fdopen(descriptor, "w") as file:
        json.dump(asdict(key), file)
    return key


def read_key(path: Path) -> JobKey:
    """The key in a file; raises LaunchError if it is none, or if others could have read it."""
    try:
        with path.open() as file:
            status = os.fstat(file.fileno())
            text = file.read(4096)
    except OSError as error:
        raise LaunchError(
            f"cannot read the job's key {path}: {error.strerror}; copy the file that the first machine printed"
        ) from None
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise LaunchError(
            f"{path} can be read by others (mode {stat.S_IMODE(status.st_mode):o} instead of 600), who could then take "
            f"part in the run; chmod 600 {path}, and use a new key if others have an account here"
        )
    try:
        found = json.loads(text)
        key = JobKey(**found)
    except (ValueError, TypeError):
        raise LaunchError(f"{path} is no key of a job; copy the file that the first machine printed") from None
    if not all(isinstance(one, str) and len(one) == KEY_BYTES for one in asdict(key).values()):
        raise LaunchError(f"{path} is no key of a job: keys have {KEY_BYTES} characters; copy it again")
    return key


def key_for(address: str, key_file: str | None) -> JobKey | None:
    """The key for servers at an address; None for those of this host, which need none."""
    if not address.startswith("tcp://"):
        return None
    if key_file is None:
        raise LaunchError(
            f"servers at {address} let nobody in without the job's key; copy the key file from their machine, and give "
            "--key FILE (WEFT_KEY)"
        )
    return read_key(Path(key_file))


def secure_server(socket: Any, key: JobKey) -> None:
    """Let only workers with the key connect to a socket; before it is bound."""
    socket.curve_server = True
    socket.curve_publickey = key.server_public.encode()
    socket.curve_secretkey = key.server_secret.encode()
    socket.zap_domain = b"weft"


def secure_worker(socket: Any, key: JobKey) -> None:
    """Connect a socket only to servers with the key; before it connects."""
    socket.curve_serverkey = key.server_public.encode()
    socket.curve_publickey = key.worker_public.encode()
    socket.curve_secretkey = key.worker_secret.encode()


def let_in(context: Any, key: JobKey) -> Callable[[], None]:
    """Answer ZeroMQ's question whether a peer may connect, in a thread, for all sockets of a context that were made
    secure; returns what ends it. A peer must have proved that it has the secret half of the workers' key by then."""
    import zmq
    from zmq.auth.thread import ThreadAuthenticator

    allowed = key.worker_public.encode()

    class Known:
        def callback(self, domain: str, their_key: bytes) -> bool:
            return zmq.utils.z85.encode(their_key) == allowed if len(their_key) == 32 else their_key == allowed

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain="weft", credentials_provider=Known())
    return authenticator.stop
