"""ZeRO-3 with a prefetch that counts bytes and not units.

The model is the one of `uneven_units`: blocks of 1, 1, 1, 8, 1, 1 and 1 layers. With prefetch 1 two units are gathered
at once, nine layers at the worst moment. With prefetch 2 it would be ten. Gather as many units ahead as fit into the
bytes that the chapter needs anyway: three small ones at once, but never more than nine layers. `unit.following` and
`unit.preceding` are the units that are gathered together with a unit, `unit.flat.numel()` is a unit's size, and
self.units has all of them. Check it: ./launch.sh check own_prefetch
"""

from zero3 import ZeRO3


class Engine(ZeRO3):
    def plan_prefetch(self, prefetch):
        """Step 0: choose `following` and `preceding` of each unit."""
        raise NotImplementedError("Step 5: prefetch by bytes")
