"""The exercise `zero3`: gather before use, free after, in forward and in backward."""

from zerolab.teach.exercises.kinds import Blank, ChapterExercise

UNITS = Blank(
    title="Step 0: put every parameter into one unit, or into the root",
    where=("parameters_by_unit",),
    hints=(
        "What if two units share a weight? What if a unit is inside another one?",
        "Return a dictionary: each of `modules`, in their order, and then `model` as the root, with a list of its "
        "(name, parameter) in the order of model.named_parameters(). A parameter that modules of only one unit use "
        "is that unit's. The root has all the others: what is in no unit, and what several units share. A module's "
        "own parameters are module.parameters(recurse=False). A parameter in two units also belongs to the root.",
    ),
    target="about {lines} lines; every parameter in exactly one unit",
    read="the first paragraph at the top of the file",
)
PREFETCH = Blank(
    title="Step 0: choose the units to gather ahead",
    where=("ZeRO3.plan_prefetch",),
    hints=(
        "Which units run after this one in forward, which in backward? What are the root's neighbours?",
        "unit.following are the `prefetch` units that run after it, unit.preceding those that run before it, the "
        "nearest first. self.units is in the order in which they run, with the root's units last: their module is "
        "self.model. The root is used before the first unit and after the last one. With one rank nothing is "
        "gathered ahead, because nothing has to travel.",
    ),
    target="about {lines} lines; correct for every number of units ahead, 0 too",
    read="the drawing at the top of the file",
)
FREE = Blank(
    title="Step 5: free a unit, and keep its shard",
    where=("Unit.make_shard", "Unit.free"),
    hints=(
        "Which code has views of the gathered buffer, besides the module? What can be taken away from all of them at "
        "once? What if a collective still writes to it?",
        "The shard has its own memory: a copy of this rank's part, self.own, of self.flat. `free` does nothing unless "
        "self.allocated. It waits for a gather in flight (self.wait()), then gives back the memory under self.flat: "
        "the storage's, because autograd and the model keep views of it. self.allocated is False from then on.",
    ),
    target="about {lines} lines. No memory of the gathered parameters is left, even where views of them exist",
    read="`Why freeing means resizing the storage` in Unit's docstring",
)
GATHER = Blank(
    title="Step 5: start to gather a unit, and wait for it",
    where=("Unit.start_gather", "Unit.wait"),
    hints=(
        "What is the opposite of what `free` does? Who waits, and when?",
        "`start_gather` does nothing if self.allocated. It gives the storage under self.flat its bytes back "
        "(self.flat.nbytes), starts the all-gather (self.gather()), keeps the work as self.work, and sets "
        "self.allocated. `wait` waits for self.work, if there is one, and sets it to None. The label is "
        'record_function("step 5 gather parameters").',
    ),
    target="about {lines} lines; one all-gather, into the weights: no copy, no other tensor, and in flight",
    read="`Why freeing means resizing the storage` in Unit's docstring",
)
BEFORE_FORWARD = Blank(
    title="Step 1: gather before forward, and prefetch",
    where=("ZeRO3.before_forward",),
    hints=(
        "What is needed now, what is needed next, and for which of the two does the rank have to wait? And what if "
        "backward runs this forward?",
        "`unit` is about to run. unit.following are the units that run next. Start to gather `unit` and all of these, "
        "and wait only for `unit`: the others travel while it computes. If backward runs this forward again "
        "(in_backward()), do what backward does: return self.before_backward(unit).",
    ),
    target="about {lines} lines. In forward the root, the unit at work and `prefetch` more are gathered, each once",
    read="the drawing of forward at the top of the file: a gather is left of what it hides behind",
)
AFTER_FORWARD = Blank(
    title="Step 1: free after forward",
    where=("ZeRO3.after_forward",),
    hints=(
        "Which code needs the unit after its forward? And what if backward runs the forward?",
        "Free the unit, and have autograd report when backward comes back to it: self.watch_output(unit, output). A "
        "unit that runs once more inside backward (in_backward()) stays, because its own backward comes right after.",
    ),
    target="about {lines} lines; a unit is gathered no longer than it computes",
    read="the drawing of forward at the top of the file",
)
REACHED = Blank(
    title="Step 2: notice that backward has come to a unit",
    where=("ZeRO3.unpack", "ZeRO3.on_output"),
    hints=(
        "Autograd asks for a saved weight right before it reads it. Whose weight is it? And when does a gradient at a "
        "unit's output not mean that its backward comes?",
        "`unpack` is given what `pack` returned: a tensor and its version at that time. A tensor with a different "
        "version now was changed in place: a RuntimeError. self.unit_of_storage.get(storage_of(tensor)) is the unit "
        "whose weight the tensor is, or a view of. If there is one, self.before_backward(unit) gathers it inside of "
        "backward (in_backward()), and check_allocated(unit) refuses a freed weight outside of backward. Return the "
        "tensor. `on_output` calls self.notice_backward(), and self.before_backward(unit) unless the unit has all its "
        "gradients.",
    ),
    target="about {lines} lines; no weight is read before its unit is gathered",
    read="the comment above these functions",
)
BEFORE_BACKWARD = Blank(
    title="Step 2: gather before backward, and prefetch",
    where=("ZeRO3.before_backward",),
    hints=(
        "As before forward, the other way round. Which of the units before has backward been through already?",
        "self.notice_backward() first. Backward has come to `unit`, and next it needs the units in unit.preceding. "
        "Start to gather `unit` and these, but none whose `missing` is empty: backward has been there. Wait only for "
        "`unit`.",
    ),
    target="about {lines} lines; every unit gathered once more, before its backward, `prefetch` ahead",
    read="the drawing of backward at the top of the file",
)
BACKWARD = Blank(
    title="Step 2: notice that a backward begins and ends",
    where=("ZeRO3.notice_backward", "ZeRO3.end_backward"),
    hints=(
        "A stage sees gradients and saved tensors, and no beginning. How does it know that they are another "
        "backward's?",
        "torch._C._current_graph_task_id() is a number for each backward. If it is not self.backward_id, keep it "
        "there, expect all gradients (self.expect_gradients()) and have autograd call self.end_backward when this "
        "backward is over: Variable._execution_engine.queue_callback(weak_hook(self.end_backward)). `end_backward` "
        "receives the last reduction (self.receive()) and frees all units (self.free_all()).",
    ),
    target="about {lines} lines; after each backward nothing is in flight, and nothing gathered",
    read="the comments in zero3.py about `backward_id` and `free_all`",
)
ON_GRADIENT = Blank(
    title="Step 2: free and reduce a unit whose gradients are finished",
    where=("ZeRO3.on_gradient", "ZeRO3.finish"),
    hints=(
        "When is the last gradient of a unit there? Will anybody read its weights again in this backward?",
        "self.notice_backward() first, then check_gradient(unit, param) for the parameter's unit, "
        "self.unit_of_param[param]. Remove the parameter from unit.missing. When nothing is missing, "
        "self.finish(unit): free the unit, then self.send(unit).",
    ),
    target="about {lines} lines. In backward the root, the unit at work and `prefetch` more are gathered, and two "
    "units' gradients are whole. A unit has its reduce-scatter right after its backward",
    read="the drawing of backward at the top of the file; `send` and `receive`",
)

EXERCISE = ChapterExercise(
    chapter="zero3",
    goal="holds 4Ψ/N bytes of parameters, 4Ψ/N of gradients and 8Ψ/N of optimizer state, for Ψ parameters in the "
    "model. Only the root, the unit at work and `prefetch` more are gathered. It sends 3Ψ elements: all-gather, "
    "all-gather, reduce-scatter",
    blanks=(
        UNITS,
        PREFETCH,
        FREE,
        GATHER,
        BEFORE_FORWARD,
        AFTER_FORWARD,
        REACHED,
        BEFORE_BACKWARD,
        BACKWARD,
        ON_GRADIENT,
    ),
)
