"""One engine, any number of threads: one of them steps at a time, for the requests of all."""

import threading
from collections import deque
from types import TracebackType


class Turns:
    """A lock that is had in the order in which it was asked for: whoever steps in a loop would keep a plain one from all others. Its owner may ask again."""

    def __init__(self) -> None:
        self.threads = set[int]()  # those who ask for it or have it
        self.guard = threading.Lock()  # held for a moment, around what follows
        self.owner, self.depth = 0, 0  # the thread whose turn it is, and how often it asked
        self.queue: deque[tuple[int, threading.Lock]] = deque()  # those who wait, each at a lock that is opened for it

    def __enter__(self) -> None:
        me = threading.get_ident()
        self.threads.add(me)
        with self.guard:
            if self.owner in (0, me):
                self.owner, self.depth = me, self.depth + 1
                return
            gate = threading.Lock()
            gate.acquire()
            self.queue.append((me, gate))
        try:
            gate.acquire()
        except BaseException:  # interrupted: it waits no more, and passes on a turn that came meanwhile
            with self.guard:
                mine = (me, gate) in self.queue
                if mine:
                    self.queue.remove((me, gate))
            if not mine:
                self.__exit__(None, None, None)
            self.threads.discard(me)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self.guard:
            self.depth -= 1
            if self.depth:
                return
            self.owner = 0
            if self.queue:
                (self.owner, gate), self.depth = self.queue.popleft(), 1
                gate.release()
        self.threads.discard(threading.get_ident())

    def inside(self) -> bool:
        """Is this thread in the middle of something? Python's collector may end a stream there, or anywhere."""
        return threading.get_ident() in self.threads
