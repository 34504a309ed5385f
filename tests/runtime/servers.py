"""A store server in a process of its own, so that a test can stop or kill it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

_FORK = multiprocessing.get_context("fork")


class StoreServer:
    """Serves a `TCPStore` from a forked process until it is killed."""

    def __init__(self) -> None:
        reader, writer = _FORK.Pipe(duplex=False)
        self._process = _FORK.Process(target=_serve, args=(writer,), daemon=True)
        self._process.start()
        writer.close()
        assert reader.poll(30), "the store's server does not start"
        self.port: int = reader.recv()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def client(self) -> Any:
        """A client with a connection of its own."""
        return self.client_of(self.port)

    @staticmethod
    def client_of(port: int) -> Any:
        """A client of the server at ``port``."""
        return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))

    def kill(self) -> None:
        """Ends the server without a word; safe to call twice."""
        if self._process.is_alive():
            os.kill(self.pid, signal.SIGKILL)
        self._process.join(timeout=10)


def _serve(writer: Connection) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    writer.send(server.port)
    signal.pause()
