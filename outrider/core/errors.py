"""The one error that users see: what is wrong, why, and what to do about it."""


class OutriderError(Exception):
    """A refusal that names the thing and the remedy. The command line turns it into exit code 2."""

    def __init__(self, what: str, why: str = "", try_this: str = "") -> None:
        self.what, self.why, self.try_this = what, why, try_this
        super().__init__(". ".join(part for part in (what, why, try_this and f"Try: {try_this}") if part))
