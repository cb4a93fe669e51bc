"""When two exceptions say the same: what is stored is copied for each raise."""


def alike(one: BaseException | None, other: BaseException | None) -> bool:
    """Whether two exceptions are different objects of the same class, arguments, attributes and
    causes."""
    if one is None or other is None:
        return one is other
    return (
        one is not other
        and type(one) is type(other)
        and one.args == other.args
        and vars(one) == vars(other)
        and alike(one.__cause__, other.__cause__)
    )
