"""Who is connected to the failure server: only ranks that show its token, and only the server answers with it."""

from __future__ import annotations

import json
import socket
import threading

import pytest
import torch.distributed as dist

from weft.comm.failures import server as failure_server
from weft.comm.failures.lines import as_line
from weft.comm.failures.server import FailureServer, connect_to_failure_server


def said_by_rank_0(port: int, token: str) -> dist.HashStore:
    """A store with the address of a failure server on another host."""
    store = dist.HashStore()
    names = {"host": "elsewhere", "host_name": "127.0.0.1", "ip": None}
    store.set("address", json.dumps({"port": port, "token": token, **names}))
    return store


def test_a_rank_is_connected_once_the_server_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    server = FailureServer()
    reached = connect_to_failure_server(said_by_rank_0(server.port, server.token), 1)
    assert reached is not None
    line = reached[0]
    server.close()
    assert line.recv(100) == as_line({"closed": True}), "the answer itself was taken off the line"
    line.close()


@pytest.mark.parametrize("answer", [b"", b"x" * 4096], ids=["closes", "answers something else"])
def test_another_program_on_the_port_is_not_the_death_of_rank_0(
    answer: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Proxies accept every connection; a rank that took one for the failure server would end when it is closed."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as proxy:

        def accept() -> None:
            line, _ = proxy.accept()
            with line:
                line.recv(4096)
                line.sendall(answer)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        with caplog.at_level("WARNING", logger="weft"):
            assert connect_to_failure_server(said_by_rank_0(proxy.getsockname()[1], "token"), 1) is None
        thread.join(10)
    assert "no watch over failed ranks" in caplog.text


def test_a_stranger_is_dropped_before_it_fills_memory() -> None:
    server = FailureServer()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as line:
        with pytest.raises(OSError):
            for _ in range(1000):
                line.sendall(b"x" * failure_server._MOST_UNKNOWN_BYTES)
                line.settimeout(0.01)
                try:
                    if line.recv(1) == b"":
                        raise ConnectionError
                except TimeoutError:
                    pass
    server.close()
