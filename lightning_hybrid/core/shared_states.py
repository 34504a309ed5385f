"""What ranks tell each other about their devices, and how old it is for the one who reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hybrid.core.device_state import DeviceState
from lightning_hybrid.core.errors import ConfigError

FORMAT = 1
"""Version of the bytes of a `StateNote`."""


@dataclass(frozen=True, slots=True)
class StateNote:
    """What a rank has written last about its device.

    ``serial`` counts the rank's notes. ``session`` is the reader's own word, which the rank has read before it wrote:
    a note that carries it is younger than the reader's session.
    """

    serial: int
    session: str
    state: DeviceState

    def to_bytes(self) -> bytes:
        """A head of format, serial and session, and a line of JSON, every known field of the state in it."""
        return f"{FORMAT} {self.serial} {self.session}\n{self.state.to_json()}".encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> StateNote:
        """What `to_bytes` wrote.

        Raises:
            ConfigError: it is of another format.
        """
        head, _, body = data.decode().partition("\n")
        written, serial, session = head.split(" ")
        if written != str(FORMAT):
            raise ConfigError("format of a device's state", written, f"be {FORMAT}, as all ranks run one version")
        return cls(int(serial), session, DeviceState.from_json(body))


class RankStates:
    """The newest state of every rank's device, as one of them knows it.

    A rank whose note does not change is silent after ``stale_s`` seconds of the reader's own clock: the clocks of two
    machines are never compared.

    Args:
        ranks: Whose notes are read.
        session: The reader's word; notes without it are of an earlier run and pass for none.
        stale_s: Seconds without a new note after which a rank is silent.
    """

    def __init__(self, ranks: Sequence[int], session: str, stale_s: float) -> None:
        self.ranks = tuple(ranks)
        self._session, self._stale_s = session, stale_s
        self._found: dict[int, tuple[bytes, StateNote, float]] = {}
        self._silent: dict[int, tuple[StateNote, DeviceState]] = {}

    def take_in(self, notes: Sequence[bytes | None], now_s: float) -> None:
        """Takes in what was read at ``now_s``, a note of each rank in the order of ``ranks``; ``None`` where is none.

        Raises:
            ConfigError: a note is of another format.
        """
        for rank, data in zip(self.ranks, notes, strict=True):
            if data is None or (rank in self._found and self._found[rank][0] == data):
                continue
            note = StateNote.from_bytes(data)
            if note.session == self._session:
                self._found[rank] = (data, note, now_s)

    def age_s(self, rank: int, now_s: float) -> float | None:
        """Seconds since a new note of ``rank`` was seen; ``None`` before the first."""
        return now_s - self._found[rank][2] if rank in self._found else None

    def states(self, now_s: float) -> dict[int, DeviceState]:
        """The state of every rank that has spoken; of a silent one, who its device is and that it is silent."""
        return {rank: self._state(rank, now_s) for rank in self.ranks if rank in self._found}

    def _state(self, rank: int, now_s: float) -> DeviceState:
        _, note, seen_s = self._found[rank]
        if now_s - seen_s <= self._stale_s:
            return note.state
        told = self._silent.get(rank)
        if told is None or told[0] is not note:
            why = f"rank {rank} has told nothing about its device for more than {self._stale_s:g} s"
            told = self._silent[rank] = (note, note.state.silent(why))
        return told[1]
