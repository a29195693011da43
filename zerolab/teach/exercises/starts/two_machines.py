"""ZeRO-1 that gathers in two steps, for ranks on two machines: 0 and 1 are on one of them, 2 and 3 on the other.

Between machines the network is slow. In the chapter's all-gather every rank receives three shards, two of them from the
other machine. Gather across machines first, one shard, from the rank that has your place there. Then gather inside your
machine what both have. In which order do the shards come then? Every rank makes all groups (dist.new_group), in one
order. You may wait for each collective at once. Check it: ./launch.sh check two_machines 4
"""

from zero1 import ZeRO1


class Engine(ZeRO1):
    def step(self):
        raise NotImplementedError("Step 5: gather across machines, then inside of them")
