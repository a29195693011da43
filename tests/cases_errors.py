"""What an action raises."""


def message(action, *kinds) -> str:
    kinds = kinds or (Exception,)
    try:
        action()
    except kinds as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")
