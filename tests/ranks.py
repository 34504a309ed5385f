"""Runs one function on several forked ranks with a gloo environment, with a deadline that cannot be missed.

The imports of the parent are inherited, so a rank starts in milliseconds instead of the seconds that importing
lightning takes. Ranks look to Lightning as if a launcher had started them: ``Trainer(strategy="ddp", devices=N)``
joins them, and `trainer.predict` returns its predictions.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

_FORK = multiprocessing.get_context("fork")


class RankFailed(AssertionError):
    """A rank raised, died, or was still running at the deadline."""


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on right now."""
    with contextlib.closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    deadline_s: float = 45.0,
    env: Mapping[str, str] | None = None,
    expect_failure: bool = False,
) -> list[Any]:
    """What ``function(rank, *args)`` returned on each of ``world_size`` forked ranks.

    With ``expect_failure`` the list holds, for each rank, the text of what it raised (or what it returned) instead.

    Raises:
        RankFailed: a rank failed and ``expect_failure`` is not set, or the deadline passed.
    """
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "NODE_RANK": "0",
        "OMP_NUM_THREADS": "1",
        **(env or {}),
    }
    readers: list[Connection] = []
    processes = []
    for rank in range(world_size):
        reader, writer = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=_rank_main, args=(function, rank, args, shared, writer, deadline_s))
        process.start()
        writer.close()
        readers.append(reader)
        processes.append(process)
    try:
        outcomes = _collect(readers, time.monotonic() + deadline_s)
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
                process.join()
    if not expect_failure:
        failed = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
        if failed:
            raise RankFailed("\n".join(failed))
    return [value for _, value in outcomes]


def _collect(readers: list[Connection], deadline: float) -> list[tuple[bool, Any]]:
    outcomes: dict[Connection, tuple[bool, Any]] = {}
    while len(outcomes) < len(readers):
        pending = [reader for reader in readers if reader not in outcomes]
        ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = [readers.index(reader) for reader in pending]
            raise RankFailed(f"ranks {late} were still running at the deadline; others: {list(outcomes.values())}")
        for reader in ready:
            assert isinstance(reader, Connection)
            try:
                outcomes[reader] = pickle.loads(reader.recv_bytes())
            except EOFError:
                outcomes[reader] = (False, "died without a word")
    return [outcomes[reader] for reader in readers]


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    args: tuple[Any, ...],
    env: Mapping[str, str],
    writer: Connection,
    deadline_s: float,
) -> None:
    import numpy as np
    import torch

    # a rank that hangs says where, right before it is ended
    faulthandler.dump_traceback_later(0.95 * deadline_s, file=sys.__stderr__)
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    seed = int(os.environ.get("TEST_SEED", "0"))
    random.seed(seed + rank)
    np.random.seed(seed + rank)
    torch.manual_seed(seed + rank)
    try:
        outcome = (True, function(rank, *args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    with contextlib.suppress(BrokenPipeError):
        # plain pickle: torch's own would send tensors as handles that end with this process
        writer.send_bytes(pickle.dumps(outcome))
    writer.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # not sys.exit: a rank whose peer failed must not wait in the exit handlers of the process group
    os._exit(0 if outcome[0] else 1)
