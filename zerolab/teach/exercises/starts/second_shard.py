"""ZeRO-3 with a second shard, for ranks on two machines: 0 and 1 are on one of them, 2 and 3 on the other.

Between machines the network is slow. The chapter gathers every unit twice in a step, from all ranks. In forward this
is necessary, because the weights are new. But while a unit is gathered, every machine has all of it. So each rank can
keep half of it, the second shard, and backward gathers the unit from the two halves inside the machine. This is hpZ of
the paper ZeRO++. It costs memory: half of each unit, besides the quarter in the first shard.

Four things to think of. Where does the chapter free a unit, and may a gather still be writing to it then? When does
a second shard become out of date? A view of a copy keeps the whole copy alive. Every rank makes all groups
(dist.new_group), in one order. Check it: ./launch.sh check second_shard 4
"""

from zero3 import ZeRO3


class Engine(ZeRO3):
    def __init__(self, model, optimizer, *, units=None, prefetch=1, group=None):
        raise NotImplementedError("Step 5: gather inside the machine in backward")
