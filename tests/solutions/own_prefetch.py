from zero3 import ZeRO3


class Engine(ZeRO3):
    def plan_prefetch(self, prefetch):
        super().plan_prefetch(prefetch)
        most = max(one.flat.numel() + other.flat.numel() for one, other in zip(self.units, self.units[1:]))
        for place, unit in enumerate(self.units):
            unit.following = self.that_fit(unit, self.units[place + 1 :], most)
            unit.preceding = self.that_fit(unit, self.units[:place][::-1], most)

    def that_fit(self, unit, others, most):
        found = []
        room = most - unit.flat.numel()
        for other in others:
            room -= other.flat.numel()
            if room < 0:
                break
            found.append(other)
        return found
