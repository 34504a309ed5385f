"""The background thread of a replica: publishes its record, reads the others', and runs the dealer's errands."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.errors import CollectiveInQueueMode, CoordinationTimeout, PeerFailed
from lightning_hybrid.core.peers import Peers
from lightning_hybrid.core.published import Published
from lightning_hybrid.core.state import DeviceState, ReplicaRecord
from lightning_hybrid.runtime.sharedqueue import Alarm, SharedQueue

_NEVER = math.inf


class Board:
    """What the replicas of one epoch know of each other.

    Args:
        queue: The epoch's keys on the store.
        replica: Who this is.
        num_replicas: How many there are.
        config: Periods and deadlines.
        read_device: Called on the background thread, at most once per ``config.device_period_s``.
        watch: Called on the background thread every period; a text ends the run on every rank.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        queue: SharedQueue,
        replica: int,
        num_replicas: int,
        config: HybridConfig,
        *,
        read_device: Callable[[], DeviceState] | None = None,
        watch: Callable[[], str | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.changed = threading.Condition()
        """Notified whenever the background thread learnt or did something."""
        self.waited_s = 0.0
        """How long the loop's thread has waited here for other replicas or the store."""
        self.view = Peers(
            replica,
            num_replicas,
            clock,
            # who sweeps for what the dead have left must see everyone
            look_replicas=config.look_replicas if config.lease_s is None else num_replicas,
            overdue_s=config.exchange_period_s(num_replicas),
        )
        """The replicas as this one sees them, itself too."""
        self.source: Callable[[], ReplicaRecord] | None = None
        """Makes this replica's newest record; asked on the background thread whenever it wakes."""
        self.recut: bool | None = None
        self.policy: str | None = None
        self.learnt: str | None = None
        """What this replica has decided for all, if it is the one that does; see `Published`."""
        self.after_exchange: list[Callable[[], None]] = []
        """Called on the background thread after each exchange."""
        self.describe: Callable[[ReplicaRecord], Published] = self._describe_alone
        self.errand: Callable[[], float] | None = None
        """The dealer's work for the background thread; returns in how many seconds it wants to be called again."""
        self._queue, self._config = queue, config
        self._read_device, self._watch, self._clock = read_device, watch, clock
        self._device: DeviceState | None = None
        self._next_device_s = self._next_exchange_s = -math.inf
        self._error: BaseException | None = None
        self._woken = self._closed = False
        self._thread = threading.Thread(target=self._run, name="lightning_hybrid-board", daemon=True)

    def start(self) -> None:
        """Starts the background thread."""
        self._thread.start()

    def close(self) -> None:
        """Ends the background thread, without waiting for a store that does not answer."""
        with self.changed:
            self._closed = self._woken = True
            self.changed.notify_all()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)

    def wake(self) -> None:
        """Makes the background thread run its errand now; needs ``changed`` to be held."""
        self._woken = True
        self.changed.notify_all()

    def exchange_soon(self) -> None:
        """Makes the background thread publish and read now."""
        with self.changed:
            self._next_exchange_s = -math.inf
            self.wake()

    def check(self) -> None:
        """Raises what ended the background thread, or the alarm of any replica."""
        if self._error is not None:
            raise self._error
        alarm = self._queue.alarm
        if alarm is not None:
            raise CollectiveInQueueMode(alarm.reason) if alarm.is_collective else PeerFailed(alarm.reason)

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Waits on the loop's thread until ``ready()``; needs ``changed`` to be held.

        Raises:
            CoordinationTimeout: nothing that any replica published changed for ``config.claim_deadline_s``.
        """
        seen, since = self._progress(), self._clock()
        start_s = since
        while not ready():
            self.check()
            self.changed.wait(timeout=self._config.publish_period_s)
            progress, now = self._progress(), self._clock()
            if progress != seen:
                seen, since = progress, now
            elif now - since > self._config.claim_deadline_s:
                raise CoordinationTimeout(
                    f"waited {now - since:.0f} s (claim_deadline_s) for {what}, and no replica made progress"
                )
        self.waited_s += self._clock() - start_s
        self.check()

    def publish(self) -> None:
        """Publishes now; on the background thread only."""
        self._refresh()
        mine = self.describe(replace(self.view.record, device=self._device))
        self._queue.publish(replace(mine, policy=self.policy, learnt=self.learnt))

    def look(self) -> None:
        """Reads now what the others published; on the background thread only."""
        published, version = self._queue.look(self.view.to_look_at())
        with self.changed:
            self.view.take_in(published, version)
            self.changed.notify_all()

    def _describe_alone(self, record: ReplicaRecord) -> Published:
        return Published(record=record, recut=self.recut)

    def _progress(self) -> list[tuple[int, int, int]]:
        return [(r, peer.record.steps, peer.reserved) for r, peer in self.view.published.items()]

    def _run(self) -> None:
        try:
            while not self._closed:
                self._turn()
        except BaseException as error:  # handed to the loop's thread, which raises it
            with self.changed:
                self._error = error
                self.changed.notify_all()

    def _refresh(self) -> None:
        if self.source is not None:
            self.view.record = self.source()

    def _turn(self) -> None:
        self._refresh()
        now = self._clock()
        if now >= self._next_exchange_s:
            view = self.view
            self._next_exchange_s = now + self._config.exchange_period_s(view.world, view.record.step_s, view.left_s)
            self._exchange(now)
        pause_s = self.errand() if self.errand else _NEVER
        with self.changed:
            if not self._woken and pause_s > 0:
                self.changed.wait(timeout=max(0.0, min(pause_s, self._next_exchange_s - self._clock())))
            self._woken = False

    def _exchange(self, now: float) -> None:
        if self._read_device is not None and now >= self._next_device_s:
            self._next_device_s = now + self._config.device_period_s
            self._device = self._read_device()
        reason = self._watch() if self._watch else None
        if reason is not None:
            self._queue.raise_alarm(Alarm(reason, is_collective=True))
        self.publish()
        self.look()
        for call in self.after_exchange:
            call()
