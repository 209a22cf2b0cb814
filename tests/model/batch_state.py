"""What `batches` searches: the home of a batch, its two parts, the members, and the messages between the queues.

No step is here, only the facts that a state has and what can be told from them.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

Item = TypeVar("Item")

PENDING = ("pending", "cancelling", "gone", "trashed")
"""The states of a member that has not ended: it waits or runs, the same with a cancel, without a record, in the trash of its
queue."""


class Counts(NamedTuple):
    """How members ended. They are put in a message as a whole, never as a difference."""

    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    lost: int = 0

    def plus(self, outcome: str, by: int = 1) -> Counts:
        """These counts with one more of `outcome`."""
        return self._replace(**{outcome: getattr(self, outcome) + by})


class Part(NamedTuple):
    """What one queue knows of the batch, besides the set of its members."""

    v: int = 0
    """The number of the opening. 0: there is no record."""
    closed: bool = False
    sealed: bool = False
    cancelled: bool = False
    counts: Counts = Counts()
    failures: int = 0
    """How often a member has failed. A member put back does not lower it. Counted if `on_failed` is "cancel"."""

    def at(self, v: int) -> Part:
        """The part in an opening that may be newer: then it is open, and an older cancel is gone."""
        return self if self.v >= v else self._replace(v=v, closed=False, cancelled=False)


class Known(NamedTuple):
    """What the home knows of a part."""

    v: int = 0
    is_open: bool = False
    counts: Counts = Counts()
    failures: int = 0


class Home(NamedTuple):
    """The record of the batch."""

    state: str = "open"
    """open, sealed or ended."""
    cancelled: bool = False
    endings: int = 0
    parts: tuple[Known, Known] = (Known(), Known())


class Message(NamedTuple):
    """A message in the outbox of a queue."""

    kind: str
    """report, cancel or follow_up."""
    about: int
    """The part, or the number of the ending."""
    v: int = 0
    closed: bool = False
    counts: Counts = Counts()
    failures: int = 0

    @property
    def topic(self) -> tuple[str, int]:
        """A newer message of a topic replaces the older one."""
        return self.kind, self.about


NOTHING = Message("nothing", 0)


class Member(NamedTuple):
    """A job of the batch."""

    part: int
    adds: bool = False
    """Its handler adds another member."""
    state: str = "pending"
    """pending, cancelling, gone (no record), trashed, finished, failed, cancelled or lost."""
    id: int = 0
    """Members may have the same id, one after the other. 0: an id of its own."""
    known: bool = True
    """Its id is in the set of members, until it has ended."""


class Run(NamedTuple):
    """A run of the member that adds another one. Without a claim it is a zombie."""

    phase: str = "begun"
    """begun, opened, refused, added, doubts (it was told that the batch has ended), or sure (it has read its own part)."""
    v: int = 0
    """The number of its opening."""
    sealed: bool = False
    brings: Message = NOTHING
    """The report that its next `open_part` carries."""
    has_claim: bool = True


class Producer(NamedTuple):
    """Opens a part, adds, and so on through its plan; then it seals."""

    plan: tuple[Member, ...]
    phase: str = "opens"
    """opens, opened, refused, sealed, stopped (it was told that the batch is cancelled) or crashed."""
    v: int = 0
    sealed: bool = False
    brings: Message = NOTHING


class Batch(NamedTuple):
    """All of it."""

    producer: Producer
    home: Home = Home()
    parts: tuple[Part, Part] = (Part(), Part())
    members: tuple[Member, ...] = ()
    runs: tuple[Run, ...] = ()
    checks: frozenset[tuple[int, int]] = frozenset()
    """`close_part` requests on their way: the part and the number of its opening."""
    outbox: frozenset[Message] = frozenset()
    copies: frozenset[Message] = frozenset()
    """Messages that a slow relay has read and not yet delivered."""
    follow_ups: tuple[int, ...] = ()
    """The endings whose follow-ups are in their queue."""
    near: bool = True
    """The home is the queue of part 0."""
    away: bool = False
    """The follow-up goes to another queue than the home."""
    strict: bool = False
    """`on_failed` is "cancel"."""
    target: int = 1
    """The part to which a handler adds."""
    target_id: int = 0
    """The id of the member that it adds."""
    openings: int = 3
    """How often a part may be opened by requests: bounds the search."""
    zombies: int = 0
    crashes: int = 0
    slow_relays: int = 0
    slow_checks: int = 0
    losses: int = 0
    """How many records of members, and messages, may vanish."""
    repairs: bool = False
    """Something was lost. Else the leader need not repeat a cancel: so the search shows what is wrong without it."""
    clears: int = 0
    """How often the queue of part 0 may be deleted."""
    failures: int = 0
    cancels: int = 0
    put_backs: int = 0
    must_end: bool = False
    """It was cancelled, or a failure cancels it, and it has not ended since."""
    spared: bool = False
    """A member was put back after the end; since then nobody has cancelled, and no member failed."""
    wrong: str = ""
    """What a step did that it must not do."""

    def has_pending(self, index: int) -> bool:
        """True if the part has members that have not ended."""
        return any(member.part == index and member.state in PENDING for member in self.members)

    def has_known(self, index: int) -> bool:
        """True if the set of members of the part is not empty."""
        return any(member.part == index and member.state in PENDING and member.known for member in self.members)

    def of_id(self, member: Member, *states: str) -> list[Member]:
        """The members of the same id in one of these states."""
        if not member.id:
            return []
        return [
            other
            for other in self.members
            if other[:1] == member[:1] and other.id == member.id and other.state in states
        ]

    def with_part(self, index: int, part: Part) -> Batch:
        """The state with one part replaced."""
        return self._replace(parts=replaced(self.parts, index, part))

    def with_member(self, old: Member, new: Member) -> Batch:
        """The state with one member replaced."""
        left = list(self.members)
        left.remove(old)
        return self._replace(members=tuple(sorted((*left, new))))

    def with_run(self, old: Run, *new: Run) -> Batch:
        """The state with one run replaced."""
        left = list(self.runs)
        left.remove(old)
        return self._replace(runs=tuple(sorted((*left, *new))))


def replaced(pair: tuple[Item, Item], index: int, item: Item) -> tuple[Item, Item]:
    """The pair with one item replaced."""
    return (item, pair[1]) if index == 0 else (pair[0], item)
