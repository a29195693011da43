"""Which units of ZeRO-3 are done, as backward moves from module to module.

A chapter's unit is done with its last gradient. Two kinds of units have no last gradient: frozen ones, and with
`find_unused` all of them, because it is not known which gradients will come. These are done when backward moves on to
another module, and the rest when backward ends.

Backward may come to a module a second time: if forward ran it twice, or if a checkpoint runs it again. Then its units
are not done any more. But one more event looks like this and is not: a module may return one of its inputs, and the
gradient of this tensor arrives long after backward has left the module. So each forward of a module has its own object
here, a *run*, and a run that backward has left is over.
"""


class BackwardOrder:
    """Called when backward reaches a module, and when backward is over. Returns which units are done.

    units   those without a last gradient. A unit is any object with a `module`
    root    the module that backward leaves only at its end: embedding and head are in it
    """

    def __init__(self, units, root):
        self.units = units
        self.root = root
        self.begin()

    def begin(self):
        """No backward runs. Called again if one has failed."""
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
        """Backward is at `module` again, which nothing else has shown. Returns the units that are needed again."""
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
