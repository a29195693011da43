"""A difference that a check finds: the expected value and the found one."""


class Differs(AssertionError):
    """A value or an event differs from the expected one."""

    def __init__(self, what: str, expected, found):
        super().__init__(f"{what}: expected {expected}, found {found}")
        self.what, self.expected, self.found = what, str(expected), str(found)
        self.call = None  # the index of the watched call after which it was found


def expect(condition, what: str, expected, found) -> None:
    """Raise `Differs` unless the condition is true."""
    if not condition:
        raise Differs(what, expected, found)
