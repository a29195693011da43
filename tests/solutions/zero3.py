"""Solutions and mistakes for the exercise `zero3`: see the docstring of this package."""

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.profiler import record_function

from zero2 import check_gradient, weak_hook
from zero3 import in_backward, storage_of


class Solution:
    def parameters_by_unit(model, modules):
        around = {}
        for unit in modules:
            for inner in unit.modules():
                around.setdefault(inner, []).append(unit)
        users = {}
        for module in model.modules():
            units = around.get(module, [])
            home = units[0] if len(units) == 1 else model
            for param in module.parameters(recurse=False):
                users.setdefault(param, set()).add(home)
        found = {unit: [] for unit in modules}
        found[model] = []
        for name, param in model.named_parameters():
            homes = users[param]
            found[homes.pop() if len(homes) == 1 else model].append((name, param))
        return found

    class ZeRO3:
        def plan_prefetch(self, prefetch):
            if self.world_size == 1:
                prefetch = 0
            inner = [unit for unit in self.units if unit.module is not self.model]
            for index in range(len(inner)):
                before, after = inner[:index], inner[index + 1 :]
                inner[index].following = after[:prefetch]
                inner[index].preceding = before[::-1][:prefetch]
            for unit in self.units:
                if unit.module is self.model:
                    unit.following = inner[:prefetch]
                    unit.preceding = inner[::-1][:prefetch]

        def before_forward(self, unit, module, inputs):
            if in_backward():
                self.before_backward(unit)
                return
            unit.start_gather()
            for each in unit.following:
                each.start_gather()
            unit.wait()

        def after_forward(self, unit, module, inputs, output):
            if not in_backward():
                unit.free()
                self.watch_output(unit, output)

        def unpack(self, saved):
            if saved[0]._version != saved[1]:
                raise RuntimeError("a saved tensor was changed in place before backward")
            unit = self.unit_on.get(storage_of(saved[0]))
            if unit is not None:
                self.before_backward(unit)
            return saved[0]

        def on_output(self, unit, gradient):
            self.notice_backward()
            if len(unit.missing) > 0:
                self.before_backward(unit)

        def before_backward(self, unit):
            self.notice_backward()
            for each in [unit, *unit.preceding]:
                if each is unit or each.missing:
                    each.start_gather()
            unit.wait()

        def notice_backward(self):
            number = torch._C._current_graph_task_id()
            if number == self.backward_id:
                return
            self.backward_id = number
            self.expect_gradients()
            Variable._execution_engine.queue_callback(weak_hook(self.end_backward))

        def end_backward(self):
            self.receive()
            for unit in self.units:
                unit.free()

        def on_gradient(self, param):
            self.notice_backward()
            unit = self.unit_of[param]
            check_gradient(unit, param)
            unit.missing.discard(param)
            if len(unit.missing) == 0:
                self.finish(unit)

        def finish(self, unit):
            unit.free()
            self.send(unit)

    class Unit:
        def make_shard(self):
            return self.flat[self.own].clone()

        def free(self):
            if not self.allocated:
                return
            self.wait()
            self.flat.untyped_storage().resize_(0)
            self.allocated = False

        def start_gather(self):
            if self.allocated:
                return
            with record_function("step 5 gather parameters"):
                self.flat.untyped_storage().resize_(self.numel * self.flat.element_size())
                self.work = self.gather()
                self.allocated = True

        def wait(self):
            work, self.work = self.work, None
            if work is not None:
                work.wait()


# Other correct ways.


class GatherIntoPieces:
    class Unit:
        def start_gather(self):
            if not self.allocated:
                self.flat.untyped_storage().resize_(self.flat.nbytes)
                parts = list(self.flat.split(self.shard_numel))
                self.work = dist.all_gather(parts, self.shard.detach(), group=self.group, async_op=True)
                self.allocated = True


class NewShardMemory:
    class Unit:
        def make_shard(self):
            shard = torch.empty(self.shard_numel, dtype=self.flat.dtype)
            shard.copy_(self.flat[self.own])
            return shard

        def free(self):
            if self.allocated:
                if self.work:
                    self.work.wait()
                    self.work = None
                self.params[0].untyped_storage().resize_(0)
                self.allocated = False


class WaitBeforeThePrefetch:
    class ZeRO3:
        def before_forward(self, unit, module, inputs):
            if in_backward():
                return self.before_backward(unit)
            unit.start_gather()
            unit.wait()
            for each in unit.following:
                each.start_gather()

        def before_backward(self, unit):
            self.notice_backward()
            unit.start_gather()
            unit.wait()
            for each in unit.preceding:
                if len(each.missing) > 0:
                    each.start_gather()


class WatchBeforeFreeing:
    class ZeRO3:
        def after_forward(self, unit, module, inputs, output):
            if in_backward():
                return
            self.watch_output(unit, output)
            unit.free()


class PlanByLoops:
    class ZeRO3:
        def plan_prefetch(self, prefetch):
            inner = [unit for unit in self.units if unit.module is not self.model]
            for place, unit in enumerate(self.units):
                root = unit.module is self.model
                unit.following, unit.preceding = [], []
                for step in range(1, prefetch + 1):
                    after = step - 1 if root else place + step
                    before = len(inner) - step if root else place - step
                    if after < len(inner) and self.world_size > 1:
                        unit.following.append(inner[after])
                    if before >= 0 and self.world_size > 1:
                        unit.preceding.append(inner[before])


class UnitsBySets:
    def parameters_by_unit(model, modules):
        count = {}
        for module in model.modules():
            inside = [unit for unit in modules if module in list(unit.modules())]
            for param in module.parameters(recurse=False):
                count.setdefault(param, []).append(inside[0] if len(inside) == 1 else None)
        result = {}
        for unit in [*modules, model]:
            result[unit] = []
        for name, param in model.named_parameters():
            first, *others = count[param]
            alone = first is not None and all(other is first for other in others)
            result[first if alone else model].append((name, param))
        return result


# Mistakes.


class TheFirstUserHasIt:
    found = "if two units share a weight"

    def parameters_by_unit(model, modules):
        found, seen = {unit: [] for unit in [*modules, model]}, set()
        names = {param: name for name, param in model.named_parameters()}
        for unit in [*modules, model]:
            for param in unit.parameters():
                if param not in seen:
                    seen.add(param)
                    found[unit].append((names[param], param))
        return found


class NothingIsReturned:
    found = "is a return missing"

    def parameters_by_unit(model, modules):
        held = {unit: [] for unit in modules}
        held[model] = list(model.named_parameters())


class AllInTheRoot:
    found = "len(what parameters_by_unit returns"

    def parameters_by_unit(model, modules):
        held = {unit: [] for unit in modules}
        held[model] = list(model.named_parameters())
        return held


class RightForPrefetch1Only:
    found = "with prefetch"

    class ZeRO3:
        def plan_prefetch(self, prefetch):
            inner = [unit for unit in self.units if unit.module is not self.model]
            ahead = 1 if self.world_size > 1 else 0
            for index, unit in enumerate(inner):
                unit.following = inner[index + 1 : index + 1 + ahead]
                unit.preceding = inner[max(0, index - ahead) : index]
            for root in self.units[len(inner) :]:
                root.following = inner[:ahead]
                root.preceding = inner[::-1][:ahead]


class FarthestFirst:
    """`preceding` is not reversed, which makes no difference with prefetch 1."""

    found = "with prefetch 2"

    class ZeRO3:
        def plan_prefetch(self, prefetch):
            ahead = prefetch if self.world_size > 1 else 0
            inner = [unit for unit in self.units if unit.module is not self.model]
            for index, unit in enumerate(inner):
                unit.following = inner[index + 1 : index + 1 + ahead]
                unit.preceding = inner[max(0, index - ahead) : index]
            for root in self.units[len(inner) :]:
                root.following = inner[:ahead]
                root.preceding = inner[::-1][:ahead]


class OneRankPrefetches:
    found = "in a group of one rank"

    class ZeRO3:
        def plan_prefetch(self, prefetch):
            inner = [unit for unit in self.units if unit.module is not self.model]
            for index, unit in enumerate(inner):
                unit.following = inner[index + 1 : index + 1 + prefetch]
                unit.preceding = inner[max(0, index - prefetch) : index][::-1]
            for root in self.units[len(inner) :]:
                root.following = inner[:prefetch]
                root.preceding = inner[::-1][:prefetch]


class GathersTheFirstOfTheFollowing:
    found = "with prefetch 2"

    class ZeRO3:
        def before_forward(self, unit, module, inputs):
            if in_backward():
                return self.before_backward(unit)
            for each in (unit, *unit.following[:1]):
                each.start_gather()
            unit.wait()


class GathersTheFirstOfThePreceding:
    found = "with prefetch 2"

    class ZeRO3:
        def before_backward(self, unit):
            self.notice_backward()
            unit.start_gather()
            if unit.preceding and unit.preceding[0].missing:
                unit.preceding[0].start_gather()
            unit.wait()


class FreedByForgetting:
    found = "of free"

    class Unit:
        def free(self):
            if self.allocated:
                self.wait()
                self.flat = None
                self.allocated = False


class FreedByData:
    found = "of free"

    class Unit:
        def free(self):
            if self.allocated:
                self.wait()
                for param in self.params:
                    param.data = torch.empty(0, dtype=param.dtype)
                self.allocated = False


class FreedWhileItArrives:
    found = ""  # a rank may die, and then it says nothing

    class Unit:
        def free(self):
            if self.allocated:
                self.work = None
                self.flat.untyped_storage().resize_(0)
                self.allocated = False


class NotNotedAsFree:
    found = "allocated"

    class Unit:
        def free(self):
            if self.allocated:
                self.wait()
                self.flat.untyped_storage().resize_(0)


class ShardInFreedMemory:
    found = ""

    class Unit:
        def make_shard(self):
            return self.flat[self.own].detach()


class WaitedForAtOnce:
    found = "waited for already"

    class Unit:
        def start_gather(self):
            if not self.allocated:
                self.flat.untyped_storage().resize_(self.flat.nbytes)
                self.work = self.gather()
                self.wait()
                self.allocated = True


class NewMemory:
    found = "of start_gather"

    class Unit:
        def start_gather(self):
            if not self.allocated:
                self.flat = self.flat.new_empty(self.numel)
                self.work = self.gather()
                self.allocated = True


class ElementsAndNotBytes:
    found = "Does resize_() get bytes (numel() * element_size())?"

    class Unit:
        def start_gather(self):
            if not self.allocated:
                self.flat.untyped_storage().resize_(self.numel)
                self.work = self.gather()
                self.allocated = True


class TooManyBytes:
    found = "bytes of the storage under self."

    class Unit:
        def start_gather(self):
            if not self.allocated:
                self.flat.untyped_storage().resize_(2 * self.flat.nbytes)
                self.work = self.gather()
                self.allocated = True


class LeavesOutPadding:
    found = ""  # a rank may die, and then it says nothing

    class Unit:
        def start_gather(self):
            if not self.allocated and self.shard.any():
                self.flat.untyped_storage().resize_(self.flat.nbytes)
                self.work = self.gather()
                self.allocated = True


class NoPrefetch:
    found = "of before_forward"

    class ZeRO3:
        def before_forward(self, unit, module, inputs):
            if in_backward():
                return self.before_backward(unit)
            unit.start_gather()
            unit.wait()


class WaitsForThePrefetched:
    found = "in flight"

    class ZeRO3:
        def before_forward(self, unit, module, inputs):
            if in_backward():
                return self.before_backward(unit)
            for each in (unit, *unit.following):
                each.start_gather()
                each.wait()


class UsesBeforeTheWait:
    found = "in flight"

    class ZeRO3:
        def before_forward(self, unit, module, inputs):
            if in_backward():
                return self.before_backward(unit)
            for each in (unit, *unit.following):
                each.start_gather()


class FreesInRecomputation:
    found = "recomputed"

    class ZeRO3:
        def after_forward(self, unit, module, inputs, output):
            unit.free()
            if not in_backward():
                self.watch_output(unit, output)


class KeepsAfterForward:
    found = "allocated after call"

    class ZeRO3:
        def after_forward(self, unit, module, inputs, output):
            if not in_backward():
                self.watch_output(unit, output)


class OutputIsNotWatched:
    found = "collectives"

    class ZeRO3:
        def after_forward(self, unit, module, inputs, output):
            if not in_backward():
                unit.free()


class OutputsGradientIsNoSign:
    found = "collectives"

    class ZeRO3:
        def unpack(self, saved):
            if saved[0]._version != saved[1]:
                raise RuntimeError("a saved tensor was changed in place before backward")
            unit = self.unit_on.get(storage_of(saved[0]))
            if unit is not None:
                self.before_backward(unit)
            return saved[0]

        def on_output(self, unit, gradient):
            self.notice_backward()


class WeightsAreNotNoticed:
    found = "unpack"

    class ZeRO3:
        def unpack(self, saved):
            return saved[0]


class VersionsAreNotCompared:
    found = "if a saved tensor is changed in place"

    class ZeRO3:
        def unpack(self, saved):
            unit = self.unit_on.get(storage_of(saved[0]))
            if unit is not None:
                self.before_backward(unit)
            return saved[0]


class GathersWhatIsDone:
    found = "before_backward"

    class ZeRO3:
        def before_backward(self, unit):
            self.notice_backward()
            for each in [unit, *unit.preceding]:
                each.start_gather()
            unit.wait()


class NoPrefetchInBackward:
    found = "before_backward"

    class ZeRO3:
        def before_backward(self, unit):
            self.notice_backward()
            unit.start_gather()
            unit.wait()


class BackwardBeforeTheWait:
    found = "in flight"

    class ZeRO3:
        def before_backward(self, unit):
            self.notice_backward()
            for each in [unit, *unit.preceding]:
                if each is unit or each.missing:
                    each.start_gather()


class NoEnd:
    found = "end_backward"

    class ZeRO3:
        def notice_backward(self):
            number = torch._C._current_graph_task_id()
            if self.backward_id != number:
                self.backward_id = number
                self.expect_gradients()


class GradientsAreNotExpected:
    found = "missing"

    class ZeRO3:
        def notice_backward(self):
            number = torch._C._current_graph_task_id()
            if self.backward_id != number:
                self.backward_id = number
                Variable._execution_engine.queue_callback(weak_hook(self.end_backward))


class LastReductionIsForgotten:
    found = "in flight"

    class ZeRO3:
        def end_backward(self):
            self.free_all()


class RootStays:
    found = "of end_backward"

    class ZeRO3:
        def end_backward(self):
            self.receive()


class KeepsAfterBackward:
    found = "allocated after call"

    class ZeRO3:
        def finish(self, unit):
            self.send(unit)


class ReceivesAtOnce:
    found = "in flight after those of call"

    class ZeRO3:
        def finish(self, unit):
            unit.free()
            self.send(unit)
            self.receive()


class AGradientIsNoSign:
    found = "if a gradient is the first event of a backward"

    class ZeRO3:
        def on_gradient(self, param):
            unit = self.unit_of[param]
            check_gradient(unit, param)
            unit.missing.remove(param)
            if not unit.missing:
                self.finish(unit)
