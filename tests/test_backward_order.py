"""`BackwardOrder` by hand: no ranks, no tensors. A unit is any object with a module, and a module any object."""

from dataclasses import dataclass

from zerolab.engine.backward_order import BackwardOrder


@dataclass(frozen=True)
class Unit:
    module: str
    kind: str = "frozen"


ROOT = Unit("root")
A, B, C = Unit("a"), Unit("b"), Unit("c")


def order_of(*units):
    return BackwardOrder(units, root="root")


def visit(order, *modules):
    """The units that are done at each of these events."""
    return [list(order.reach(module)[0]) for module in modules]


def test_a_unit_is_done_when_backward_moves_on():
    order = order_of(A, B, C, ROOT)
    assert visit(order, "c", "c", "b", "b", "a") == [[], [], [C], [], [B]]
    assert order.end() == [ROOT, A]


def test_every_unit_is_done_once_also_if_backward_never_came():
    """With `find_unused` each unit is sent in each backward, because other ranks may have gradients for it."""
    order = order_of(A, B, C, ROOT)
    assert visit(order, "c", "a") == [[], [C]]
    assert order.end() == [ROOT, B, A]  # the same order on all ranks, wherever backward has been
    assert order_of(A, B, C).end() == [C, B, A]


def test_the_root_is_left_only_at_the_end():
    """Autograd asks for the root's weights first (the head) and last (the embedding), and between two units."""
    order = order_of(A, B, ROOT)
    assert visit(order, "root", "b", "root", "a", "root") == [[], [], [], [B], []]
    assert order.end() == [ROOT, A]


def test_a_second_backward_begins_anew():
    """Where the last one ended must not count, or the first unit would be done before backward has reached it."""
    order = order_of(A, B)
    for _ in range(3):
        assert visit(order, "b", "a") == [[], [B]]
        assert order.end() == [A]


def test_after_a_backward_that_failed():
    order = order_of(A, B, C)
    visit(order, "c", "b")
    order.begin()
    assert visit(order, "c", "b", "a") == [[], [C], [B]]
    assert order.end() == [A]


def test_units_of_one_module_are_done_together():
    """A module has a unit for each dtype, and one for frozen parameters."""
    frozen, half = Unit("b"), Unit("b", "half")
    order = order_of(A, frozen, half)
    assert visit(order, "b", "a") == [[], [frozen, half]]
    assert order.end() == [A]


def test_modules_without_such_units_are_left_too():
    """A module whose units all have a last gradient still shows that backward has moved on."""
    order = order_of(A, C)
    assert visit(order, "c", "b", "a") == [[], [C], []]
    assert order.end() == [A]


def test_a_module_that_forward_ran_twice():
    """Its units are needed again at the second visit, and done again after it."""
    order = order_of(A, B)
    assert visit(order, "b", "a") == [[], [B]]
    assert order.reach("b") == ([A], [B])
    assert order.reach("a") == ([B], [A])
    assert order.end() == [A]


def test_a_module_that_runs_twice_in_a_row_stays():
    order = order_of(A, B)
    assert order.reach("b", "second") == order.reach("b", "first") == ([], [])
    assert order.is_over("second") and not order.is_over("first")
    assert visit(order, "a") == [[B]]


def test_a_tensor_that_a_module_passed_on_is_not_a_visit():
    """Its gradient arrives after backward has left the module. The run is over then, another run is not."""
    order = order_of(A, B)
    order.reach("b", "run of b")
    order.reach("b")  # autograd asks for a saved weight: the same run
    assert not order.is_over("run of b")
    order.reach("a", "run of a")
    assert order.is_over("run of b") and not order.is_over("run of a") and not order.is_over("earlier run of b")
    order.end()
    assert not order.is_over("run of b"), "a second backward through the same graph visits it again"


def test_a_gradient_may_be_the_only_sign_of_a_second_visit():
    """A checkpoint inside a unit that is still gathered: nothing asks for its weights, but a gradient arrives."""
    order = order_of(A, B)
    assert visit(order, "b", "a") == [[], [B]]
    assert order.reopen("b") == [B] and order.reopen("b") == []
    assert order.end() == [B, A]
