"""Two units ahead, if together with the unit itself they are not more than the largest pair."""

from zero3 import ZeRO3


class Engine(ZeRO3):
    def plan_prefetch(self, prefetch):
        super().plan_prefetch(1)
        sizes = [unit.numel for unit in self.units]
        limit = max(map(sum, zip(sizes, sizes[1:])))
        for index, unit in enumerate(self.units):
            ahead, behind = self.units[index + 1 : index + 3], self.units[max(0, index - 2) : index][::-1]
            if unit.numel + sum(each.numel for each in ahead) <= limit:
                unit.following = ahead
            if unit.numel + sum(each.numel for each in behind) <= limit:
                unit.preceding = behind
