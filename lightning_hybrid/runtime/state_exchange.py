"""Makes the state of every rank's device known to rank zero, through the store and in the background."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable

from lightning_hybrid.core.device_state import DeviceState
from lightning_hybrid.core.errors import ConfigError, CoordinationTimeout
from lightning_hybrid.core.shared_states import RankStates, StateNote
from lightning_hybrid.runtime.store import Store

_log = logging.getLogger(__name__)

_MOST_NOTES_PER_S = 200.0
"""Notes that rank zero reads per second at most: of very many ranks, each is read less often."""
_STALE_PERIODS = 5
_LEAST_STALE_S = 5.0
_READER = "reader"


class StateExchange:
    """One rank's part in telling rank zero the states of all devices.

    A rank writes its newest state over its last one (``rank/<r>`` on the store, one key per rank for the job's life)
    whenever it is woken, and every ``period_s``; rank zero reads the others' as often. There is no collective, and
    nobody waits for a rank that does not answer. Rank zero's word (``reader``) is new with every `StateExchange`, and a
    note counts only if it carries it: what an earlier run or an earlier attempt of the job has left does not.

    Args:
        store: Where the notes lie.
        rank: Who this is.
        num_ranks: How many ranks there are.
        read: The newest state of this rank's device; must not wait.
        period_s: Seconds from one note to the next at most.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        num_ranks: int,
        read: Callable[[], DeviceState],
        *,
        period_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.after: list[Callable[[], None]] = []
        """Called on the background thread after each exchange."""
        self._store, self._rank, self._read, self._clock = store, rank, read, clock
        self._least_s = num_ranks / _MOST_NOTES_PER_S
        self._period_s = max(period_s, self._least_s)
        self._session = uuid.uuid4().hex[:12]
        stale_s = max(_LEAST_STALE_S, _STALE_PERIODS * self._period_s)
        self._others = RankStates(range(1, num_ranks), self._session, stale_s) if rank == 0 else None
        self._serial = 0
        self._changed = threading.Condition()
        self._is_woken = self._is_stopped = self._has_warned = False
        self._thread = threading.Thread(target=self._run, name="lightning_hybrid-states", daemon=True)

    def start(self) -> None:
        """Starts the background thread; on rank zero lets the others know first that somebody reads.

        Raises:
            CoordinationTimeout: the store does not answer rank zero.
        """
        if self._others is not None:
            self._store.put(_READER, self._session.encode())
        self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        """Ends it, without waiting longer than ``timeout_s`` for a store that does not answer; safe to call twice."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def wake(self) -> None:
        """Has this rank tell its newest state now."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def states(self) -> dict[int, DeviceState]:
        """The newest state by rank: on rank zero of every rank that has spoken, elsewhere this rank's own."""
        mine = {self._rank: self._read()}
        return mine if self._others is None else mine | self._others.states(self._clock())

    def _run(self) -> None:
        try:
            while not self._is_stopped:
                began_s = self._clock()
                self._exchange_or_warn()
                with self._changed:
                    if not self._is_woken and not self._is_stopped:
                        self._changed.wait(self._period_s)
                    # whoever wakes it, of very many ranks none is read more often
                    self._changed.wait_for(self._has_stopped, max(0.0, began_s + self._least_s - self._clock()))
                    self._is_woken = False
        except (CoordinationTimeout, ConfigError) as err:
            # ranks end at different times, and the store with rank zero's process: only rank zero loses anything
            if self._others is not None and not self._is_stopped:
                _log.warning("the states of the other ranks' devices are not known from here on: %s", err)

    def _has_stopped(self) -> bool:
        return self._is_stopped

    def _exchange_or_warn(self) -> None:
        try:
            self._exchange()
        except (TypeError, ValueError) as err:  # a state of a user's probe that is no JSON
            if not self._has_warned:
                self._has_warned = True
                _log.warning("the state of rank %d's device cannot be told: %s", self._rank, err)

    def _exchange(self) -> None:
        if self._others is None:
            self._tell()
        else:
            notes = self._store.get_many([f"rank/{rank}" for rank in self._others.ranks])
            self._others.take_in(notes, self._clock())
        for call in self.after:
            call()

    def _tell(self) -> None:
        (word,) = self._store.get_many([_READER])
        if word is None:  # nobody reads yet
            return
        self._serial += 1
        note = StateNote(self._serial, word.decode(), self._read())
        self._store.put(f"rank/{self._rank}", note.to_bytes())
