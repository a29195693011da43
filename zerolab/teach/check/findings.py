"""What a check finds: one difference, with what was expected and what was found."""


class Differs(AssertionError):
    """Something is not as it must be."""

    def __init__(self, what: str, expected, found):
        super().__init__(f"{what}: expected {expected}, found {found}")
        self.what, self.expected, self.found = what, str(expected), str(found)
        self.call = None  # the index of the watched call after which it was found


def expect(right, what: str, expected, found) -> None:
    """Raise `Differs` unless `right`."""
    if not right:
        raise Differs(what, expected, found)
