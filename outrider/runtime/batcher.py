"""Who is running and who waits. First come, first served; a request joins as soon as a row is free."""

from collections import deque
from collections.abc import Callable

from outrider.core.types import Request, Sequence


class Batcher:
    """A queue in front of `rows` places. Knows nothing of models."""

    def __init__(self, rows: int, alone: bool = False) -> None:
        self.rows, self.alone = rows, alone
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def submit(self, request: Request) -> Sequence:
        seq = Sequence(request, list(request.prompt))
        self.waiting.append(seq)
        return seq

    def admit(self, open_: Callable[[Sequence], None]) -> None:
        """Move waiting sequences into free places. One that cannot be opened ends as `failed`, with its `failure`, and neither holds up those behind it nor
        disturbs those that run."""
        while self.waiting and len(self.running) < self.rows:
            seq = self.waiting.popleft()
            try:
                open_(seq)
            except Exception as failed:
                seq.finish_reason, seq.failure = "failed", failed
                continue
            except BaseException:  # an interruption is not its fault
                self.waiting.appendleft(seq)
                raise
            self.running.append(seq)

    def groups(self) -> list[list[Sequence]]:
        """Running sequences that may share a step: greedy ones share with anyone, others with their own rule; `alone`,
        none with any other. Whose end was interrupted gets no more tokens."""
        running = [s for s in self.running if not s.finish_reason]
        if self.alone or len(running) == 1:
            return [[s] for s in running]
        rules = list(dict.fromkeys(s.request.rule for s in running if s.request.sampling.temperature > 0)) or ["greedy"]
        groups = [[s for s in running if (s.request.rule == rule if s.request.sampling.temperature > 0 else rule == rules[0])] for rule in rules]
        return [group for group in groups if group]

    @property
    def lonely(self) -> bool:
        """Is there no more than one request?"""
        return len(self.running) + len(self.waiting) <= 1

    def drop(self, seq: Sequence) -> bool:
        """Take a sequence out; True if it was running."""
        if seq in self.waiting:
            self.waiting.remove(seq)
            return False
        if seq in self.running:
            self.running.remove(seq)
            return True
        return False
