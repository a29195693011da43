"""The units of ZeRO-3 that are done, as backward moves from module to module.

In the chapter a unit is done when its last gradient is finished. Two kinds of units have no last gradient: frozen
units, and with `find_unused` all units, because nobody knows which gradients will come. Such a unit is done when
backward moves on to another module, or when backward ends.

Backward may reach a module a second time, if forward ran the module twice, or if a checkpoint runs it again. Then its
units are not done any more. Another event looks the same but is different: a module may return one of its inputs, and
the gradient of this tensor arrives long after backward has left the module. To tell these cases apart, each forward of
a module has its own object here, a *run*, and a run that backward has left is over.
"""


class BackwardOrder:
    """Its methods are called when backward reaches a module and when backward is over, and return the units done.

    units   the units without a last gradient. A unit is any object with a `module`
    root    the module that backward leaves only at its end, because the embedding and the head are in it
    """

    def __init__(self, units, root):
        self.units = units
        self.root = root
        self.begin()

    def begin(self):
        """Expect a new backward. Called at the build, after each backward, and by `zero_grad()` if one has failed."""
        self.module = None  # where backward is, never the root
        self.run = None  # the forward of this module that backward goes through, if it is known
        self.over = set()  # runs that backward has left
        self.open = dict.fromkeys(self.units)  # units that are not done, in order

    def reach(self, module, run=None):
        """Backward is at `module`. Returns (units that are done, units that were done and are needed again)."""
        if module is self.root or module is self.module and run in (None, self.run):
            return [], []
        self.over.add(self.run)
        self.run = run
        if module is self.module:
            return [], []
        done = [unit for unit in self.open if unit.module is self.module]
        for unit in done:
            del self.open[unit]
        self.module = module
        return done, self.reopen(module)

    def reopen(self, module):
        """Backward is at `module` again, and no other event has shown this. Returns the units that are needed again."""
        again = [unit for unit in self.units if unit.module is module and unit not in self.open]
        self.open.update(dict.fromkeys(again))
        return again

    def is_over(self, run):
        return run in self.over

    def end(self):
        """Backward is over. Returns the units that are not done yet, in an order that is the same on all ranks."""
        rest = [unit for unit in self.units[::-1] if unit in self.open]
        self.begin()
        return rest
