"""`./launch.sh exercise zero2`: the chapter with the bodies that matter taken out, to be written anew.

The exercises are made from the reference, so they cannot grow old beside it. The reference carries no marks:
`EXERCISES` names functions, and the statements inside them that become a blank. It names them by their structure (the
first `with`, the assignment to `self.flat`), never by how a line is spelt. What is not found is an error.
"""

import argparse
import ast
import hashlib
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "exercises"
HINTS = 1  # of each blank's two, unless another number is asked for

# Names one statement of a body, by its kind and a number or a name:
#     ("With", 0)               the first `with` (-1: the last one)
#     ("Assign", "self.flat")   the only assignment to self.flat
#     ("For", "self.trained_buckets")   the only loop over self.trained_buckets
Selector = tuple[str, int | str]


@dataclass(frozen=True)
class Blank:
    """A body to write: in the function `where` ("Class.method") the statements from `first` to `last`.

    Without `first` from the beginning of the body, without `last` to its end; `inside` names a statement, such as a
    `with`, whose body is meant in place of the function's. `task` is what the error says. Above it stand as many of its
    hints as were asked for (`idea`: what to think of, `hint`: how to go about it), and `target`, in which {lines} are
    the reference's lines of code. `read` says where to look when a check fails. A method that the class has
    from elsewhere is given with its `head`, and added to the class.
    """

    where: str
    task: str
    idea: str
    hint: str
    target: str
    read: str
    first: Selector | None = None
    last: Selector | None = None
    inside: Selector | None = None
    head: str = ""

    @property
    def step(self) -> str:
        return self.task.partition(":")[0]

    @property
    def hints(self) -> tuple[str, str]:
        return self.idea, self.hint


@dataclass(frozen=True)
class Exercise:
    """A file to write: made from the chapter `source`, whose class `engine` is checked; `goal` in numbers."""

    source: str
    engine: str
    goal: str
    blanks: tuple[Blank, ...]


_FOR_OTHERS = (
    "(`precision.before_sum`, `precision.mean_of_sum` and `self.placement.final_shard`, for float16, replicas and "
    "offload, are not needed here)"
)
_LAYOUT = Blank(
    "Bucket.__init__",
    "Step 0: lay the parameters end to end, and pad",
    "Which sizes must be multiples of what, and which of them depends on N? Round up as you go, once more at the end, "
    "and try it by hand for three parameters and N = 2.",
    "Set self.offsets (where each parameter starts), self.numel and self.shard_numel (of the buffer and of one shard) "
    "and self.start (of this rank's shard), all in elements. Every parameter and every shard starts on a multiple of "
    "16 bytes (on a GPU of 256), in the parameters' dtype and in self.param_dtype, whose elements may be smaller. "
    "numel is N shards: N rarely divides what there is, so zeros fill the rest. A shard has elements even when the "
    "parameters have none.",
    "about {lines} lines; `precision.alignment(self.params[0], self.param_dtype)` says on which multiple, in elements, "
    "parameters and shards start; less than one multiple of padding behind a parameter, less than N behind them all",
    "the picture in Bucket's docstring",
    first=("Assign", "align"),
)
_CUT = Blank(
    "Bucket.cut",
    "Step 0: cut the shard into one part per parameter",
    "Two ranges of numbers overlap or they do not. In whose coordinates does the parameter lie, and in whose does "
    "`shard` begin at 0?",
    "Parameter i lies at [offset, offset + numel) of the buffer, the shard at [start, start + shard_numel). Where the "
    "two overlap, this rank owns some of the parameter: give (i, that part of `shard`), a view and no copy. Padding "
    "belongs to nobody; a parameter may be cut by several ranks.",
    "about {lines} lines; over all ranks each element exactly once",
    "`piece` in the words at the top, and the picture in Bucket's docstring",
)
_REDUCE_1 = Blank(
    "ZeRO1._reduce_gradients",
    "Step 3: all-reduce the gradients, and give each piece its part of the mean",
    "After the collective every rank has a sum, of which it uses one part. Why is it better to start all buckets "
    "before the first is waited for?",
    "For every bucket in self.trained_buckets, bucket.flat_gradient has this rank's gradients. Sum it over the ranks "
    "(group=self.group), divide by N, and set piece.grad, in the piece's dtype, from this rank's shard of it, "
    "bucket.own_part(bucket.flat_gradient): bucket.pieces and bucket.cut(shard) have the same order. Started with "
    'async_op=True, all buckets travel at once; wait(work, "all-reduce", bucket) receives one.',
    "about {lines} lines; sends 2Ψ elements (times (N-1)/N, as all that is sent); no second copy of the gradients: sum "
    f'and mean in place, pieces with views. `wait(work, "all-reduce", bucket)` receives. {_FOR_OTHERS}',
    "the arithmetic at the top of exercises/zero1.py, `all-reduce` and `piece` in its words; ZeRO paper, section 5.1",
    first=("Assign", "works"),
    last=("For", 1),
)
_CLIP = Blank(
    "ZeRO2.clip_grad_norm_",
    "Step 3: clip the gradients by their norm over all shards",
    "What is the norm of a vector that is cut into parts, when you know each part's norm? Who must know it, and what "
    "about a rank that has no part?",
    "Receive the gradients that are in flight (self._reduce_gradients()). Take the norm of this rank's gradients, "
    "combine the ranks' norms, and scale the pieces' gradients by min(1, max_norm / (norm + 1e-6)). Return the norm. A "
    "rank may own only padding: it has no gradients, and must take part. A piece's grad may be None. A maximum over "
    "ranks may lose a NaN; all values do not. dist.all_gather_single(output, input, group=self.group) gathers N "
    "numbers.",
    "about 10 lines; sends a number per rank, never gradients; the same norm as "
    "torch.nn.utils.clip_grad_norm_ on the whole model",
    "torch.nn.utils.clip_grad_norm_'s documentation; a norm over shards is the norm of the shards' norms",
    head='''
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Between backward and `step()`: scale the gradients so that their norm is at most `max_norm`. A collective.

        Returns the norm before, a 0-d tensor that is the same on every rank: what `torch.nn.utils.clip_grad_norm_`
        gives for the whole model. Padding does not count; a NaN or inf on one rank is seen by all.
        """''',
)

EXERCISES = {
    "zero1": Exercise(
        "zero1.py",
        "ZeRO1",
        "holds 4Ψ bytes of parameters, 4Ψ of gradients, 8Ψ/N of optimizer state, with Ψ parameters in the model; sends "
        "3Ψ elements: all-reduce, then all-gather",
        (
            _LAYOUT,
            _CUT,
            _REDUCE_1,
            Blank(
                "ZeRO1.step",
                "Step 4: reduce, update this rank's pieces, gather",
                "Which of the three needs what another one leaves behind?",
                "Three calls in the right order: self._reduce_gradients(), the optimizer's, and gather_parameters(...) "
                'of the trained buckets in self.group. Wrap each in record_function("step 3 reduce gradients"), "step '
                '4 update the shard", "step 5 gather parameters": that is how a profile shows the steps.',
                "about {lines} lines; optimizer state 8Ψ/N bytes and a counter of 4 bytes per piece",
                "the steps at the top of the file; make_pieces, which says what self.optimizer has been given",
            ),
            Blank(
                "gather_parameters",
                "Step 5: all-gather the updated shards into the weights",
                "Who has the new values of which part, and where must they arrive so that the model sees them, with no"
                " copy after it?",
                "The model's weights are views of bucket.flat: an all-gather into it is all that is needed. "
                "precision.rounded_shard(bucket) is what this rank brings (bucket.shard, in mixed precision rounded). "
                'Start all of `buckets` in `group`, then wait(work, "all-gather", bucket) for each.',
                "about {lines} lines; sends Ψ elements; not a byte more alive afterwards than before, and meanwhile "
                "4Ψ/N at most. Output `precision.sendable(bucket.flat)`, input `precision.rounded_shard(bucket)`; "
                '`wait(work, "all-gather", bucket)` receives',
                "Bucket.flatten, which makes the weights views; `all-gather` in the words at the top",
            ),
        ),
    ),
    "zero1_2psi": Exercise(
        "zero1.py",
        "ZeRO1",
        "holds what ZeRO-1 holds, and sends 2Ψ elements, like DDP, and not 3Ψ: reduce-scatter, then all-gather (the "
        "chapter's other bodies are left in: solve zero1 before)",
        (
            Blank(
                "ZeRO1._reduce_gradients",
                "Step 3: reduce-scatter the gradients, and give each piece its part of the mean",
                "Of all that the all-reduce brings, what does this rank use? Which collective brings just that, and "
                "how large is its output?",
                "The chapter's all-reduce brings every rank all averaged gradients, of which it uses 1/N. A "
                "reduce-scatter brings this rank's shard alone: dist.reduce_scatter_single(shard, whole, "
                "group=self.group, async_op=True), shard of bucket.shard_numel elements. The whole must stay alive and "
                "unchanged until the work was waited for. Divide by N, and set piece.grad from bucket.cut(shard).",
                "about as many lines as the all-reduce takes ({lines}); sends Ψ elements here and 2Ψ in all; gradients "
                f'held at most 4Ψ + 4Ψ/N bytes. `wait(work, "reduce-scatter", bucket)` receives. {_FOR_OTHERS}',
                "the arithmetic at the top of exercises/zero1_2psi.py, `reduce-scatter` in its words; ZeRO paper, "
                "section 7.1",
                first=("Assign", "works"),
                last=("For", 1),
            ),
        ),
    ),
    "zero2": Exercise(
        "zero2.py",
        "ZeRO2",
        "holds 4Ψ bytes of parameters, 4Ψ/N of gradients, 8Ψ/N of optimizer state, with Ψ parameters in the model; in "
        "backward at most two buckets of whole gradients more; sends 2Ψ elements: reduce-scatter, then all-gather",
        (
            Blank(
                "Reduction.__init__",
                "Step 3: send one bucket's gradients by reduce-scatter",
                "Where must each gradient lie so that cutting the buffer into N parts is cutting the parameters? Who "
                "still reads the buffer when the call has returned?",
                "gradients.take(bucket) gives the gradient of each of bucket.params, in the parameter's shape, and "
                "sets param.grad to None. (An earlier gradient that no_sync has kept is added, and where there is "
                "none it gives zeros.) Copy each into its view (bucket.views) of a buffer self.flat of bucket.numel "
                "elements, in bucket.reduce_dtype, with zeros in the padding. Then start the reduce-scatter, in "
                "`group`, into a shard of bucket.shard_numel elements. Keep the buffer, the shard and the work for "
                "`finish`.",
                "about {lines} lines; one reduce-scatter of the bucket; no param.grad is left. "
                "`gradients.take(bucket)` gives the gradients, and takes them. (`precision.before_sum`, for float16, "
                "is not needed here)",
                "Reduction's docstring; Bucket in zero1.py",
                first=("Assign", "self.flat"),
            ),
            Blank(
                "Reduction.finish",
                "Step 3: receive this rank's shard of the mean, and free the whole gradients",
                "Which tensors keep the large buffer's memory alive, and a view of it too? What if a gradient of this "
                "step is there already?",
                'wait(work, "reduce-scatter", self.bucket), let go of the whole buffer, divide by N (world_size), and '
                "add each part of self.bucket.cut(shard) to its piece's gradient (None at first), in the piece's "
                "dtype, as add_to_pieces does it.",
                "about {lines} lines; of the whole gradients not a byte is left, gradients held 4Ψ/N bytes. "
                '`wait(self.work, "reduce-scatter", self.bucket)` receives, `precision.mean_of_sum(shard, world_size)` '
                "divides by N, `self.bucket.placement.deliver(self.bucket, shard, add_to_pieces)` adds to the "
                "pieces' gradients",
                "the first paragraph at the top of exercises/zero2.py",
            ),
            Blank(
                "ZeRO2._send",
                "Step 3: at most one bucket in flight",
                "Sending is quick and travelling is slow. At which moment must the one before have arrived, so that "
                "never more than two buckets are whole?",
                "Receive the bucket before (self._receive()), then send this one: self._in_flight is the Reduction "
                "that was sent and not received.",
                "about {lines} lines; two buckets of whole gradients at most: this one, and that which backward fills",
                "the comment above the blank, and the drawing of backward at the top of exercises/zero2.py",
                inside=("With", 0),
            ),
            Blank(
                "ZeRO2.gradients_final",
                "Step 3: inside backward, send the buckets whose turn has come",
                "Two ranks may complete their buckets in another order. What would the third collective of one rank "
                "meet on the other?",
                "Backward calls this once for every bucket, in whatever order it completes them. self._turns is a "
                "deque of self.trained_buckets, in the order in which every rank sends them; self._complete is the set "
                "of the buckets that are complete and not sent. Put `bucket` into self._complete. While the first of "
                "self._turns is in self._complete, take it off both and self._send it. It goes to the end of "
                "self._turns again, for the next backward. A bucket that is complete before its turn waits: "
                "collectives match by order.",
                "about {lines} lines; gradients in backward at most 4Ψ/N bytes + 2 buckets; each bucket sent once, "
                "inside backward, last parameters first",
                "ZeRO2's docstring (one fixed order), and the drawing of backward at the top of exercises/zero2.py",
            ),
            _CLIP,
        ),
    ),
    "zero3": Exercise(
        "zero3.py",
        "ZeRO3",
        "holds 4Ψ/N bytes of parameters, 4Ψ/N of gradients, 8Ψ/N of optimizer state, with Ψ parameters in the model; "
        "gathered are only the root, the unit at work and `prefetch` more; sends 3Ψ elements: all-gather, all-gather, "
        "reduce-scatter",
        (
            Blank(
                "make_units",
                "Step 0: put every parameter into one unit, or into the root",
                "What if two modules share a weight, and if one has no weights? The engine has helpers for both.",
                "`modules` are what becomes a unit each; where it is None, default_units(model) chooses them. "
                "parameters_by_unit(model, modules) gives {module: [(name, parameter), ...]} and the root's list of "
                "(name, parameter). Make a Unit(name, module, named parameters, rank, world_size, dtypes) of each "
                "module that has parameters, in the order of `modules`, named as in model.named_modules(). The root is "
                "a Unit, too: 'root', the model itself, what is left.",
                "about {lines} lines; every parameter in exactly one unit, and no unit without parameters. "
                "`default_units(model)` and `parameters_by_unit(model, modules)` help: see their docstrings in "
                "harness/engine/units.py. A unit is named as its module in `model.named_modules()`, the root `root`",
                "`units` and `root` at the top of exercises/zero3.py",
            ),
            Blank(
                "ZeRO3._free",
                "Step 5: free a unit",
                "Who has views of the gathered buffer, besides the module? What can be taken away from all of them at "
                "once? And what if a collective still writes to it?",
                "Nothing to do unless unit.gathered. Wait for an all-gather in flight (self._wait), then give back the "
                "memory under bucket.flat of each of unit.buckets: the storage's, as autograd and the model keep views "
                "of it. guard.close(unit.params) turns a use of the freed weights into an error. unit.gathered says "
                "how it is afterwards.",
                "about {lines} lines; not a byte of the gathered parameters is left, whoever holds views of them; "
                "nothing is freed while a gather writes to it; `unit.gathered` says how it is; "
                "`guard.close(unit.params)` makes their use an error",
                "`Why freeing means resizing the storage` at the top of exercises/zero3.py",
            ),
            Blank(
                "ZeRO3._gather",
                "Step 5: start to gather a unit",
                "What is the opposite of what `_free` does? Who waits, and when?",
                "For each of unit.buckets give the storage under bucket.flat its bytes back (for numel elements); "
                "start an all-gather of precision.rounded_shard(bucket) into it, in self.group; the work goes to "
                "unit.works, which self._wait waits for. unit.gathered is True from here on. The label is "
                'record_function("step 5 gather parameters").',
                "about {lines} lines; one all-gather per bucket, into the weights: no copy. Output "
                "`precision.sendable(bucket.flat)`, input `precision.rounded_shard(bucket)`; inside `with "
                "self.placement.copies_beside():`; a work per bucket in `unit.works`, and `unit.gathered` is true",
                "`Why freeing means resizing the storage` and `gathered` at the top of exercises/zero3.py",
                first=("With", 0),
                last=("Assign", "unit.gathered"),
            ),
            Blank(
                "ZeRO3.before_forward",
                "Step 1: gather before forward, and prefetch",
                "What is needed now, what is needed next, and for which of the two does the rank have to stand still?",
                "`unit` is about to run and needs its weights. `upcoming` are the units that run after it, as many as "
                "`prefetch` says. Start to gather them all (self._gather), the one that is needed first, and wait for "
                "`unit` only (self._wait): the others travel while it computes.",
                "about {lines} lines; gathered in forward: the root, the unit at work and `prefetch` more; each once",
                "the drawing of forward at the top of exercises/zero3.py: a gather stands left of what it hides behind",
            ),
            Blank(
                "ZeRO3.before_backward",
                "Step 2: gather before backward, and prefetch",
                "As before forward, the other way round.",
                "Backward has come to `unit` and needs its weights, and after it those of `upcoming`. Start them all, "
                "the one that is needed first, and wait for that one only.",
                "about {lines} lines; every unit gathered once more; each before its backward, `prefetch` ahead",
                "the drawing of backward at the top of exercises/zero3.py",
            ),
            Blank(
                "ZeRO3.after_backward",
                "Step 2: free after backward",
                "Will anybody read these weights again in this step?",
                "Backward is done with `unit`, so nobody needs its weights any more, whatever "
                "self.reshard_after_forward says: self._free it. Its gradients stay where they are until "
                "`gradients_final`.",
                "about {lines} line; in backward the root, the unit at work and `prefetch` more are gathered",
                "the drawing of backward at the top of exercises/zero3.py",
            ),
            Blank(
                "ZeRO3.gradients_final",
                "Step 3: reduce a unit whose gradients are final",
                "Which of the unit's buckets have gradients at all? Is every weight of the unit done with, now that "
                "these are final?",
                "self._send each bucket of the unit that has gradients: unit.trained_buckets. Do no more than that: a "
                "frozen weight of the unit may still be needed, and `after_backward` is called when it is not.",
                "about {lines} lines; in backward two buckets of whole gradients at most; a reduce-scatter per bucket "
                "of `unit.trained_buckets`, by `_send`, right after its unit's backward. `Reduction` divides by N",
                "the drawing of backward at the top of exercises/zero3.py; `_send` and `_receive` in it",
                first=("For", "unit.trained_buckets"),
            ),
        ),
    ),
}


def find(tree: ast.Module, where: str) -> ast.FunctionDef:
    """The function of that name ("Class.method" or "function"). Raises LookupError if there is none."""
    node = tree
    for part in where.split("."):
        kinds = ast.ClassDef | ast.FunctionDef
        node = next((child for child in node.body if isinstance(child, kinds) and child.name == part), None)
        if node is None:
            raise LookupError(f"there is no {where}")
    return node


def _head(statement: ast.stmt) -> set[str]:
    """What an assignment sets, or what a loop goes over."""
    match statement:
        case ast.Assign(targets=heads):
            heads = [each for head in heads for each in getattr(head, "elts", [head])]
        case ast.For(iter=head):
            heads = [head]
        case _:
            heads = []
    return {ast.unparse(head) for head in heads}


def select(body: list[ast.stmt], selector: Selector) -> int:
    """The place in `body` of the statement that `selector` names. Raises LookupError if it names none, or several."""
    kind, which = selector
    found = [place for place, statement in enumerate(body) if type(statement).__name__ == kind]
    if isinstance(which, str):
        found = [place for place in found if which in _head(body[place])]
        if len(found) != 1:
            raise LookupError(f"{selector} names {len(found)} of its statements")
        return found[0]
    if not -len(found) <= which < len(found):
        raise LookupError(f"it has no {selector}")
    return found[which]


def statements(tree: ast.Module, blank: Blank) -> list[ast.stmt]:
    """The statements of the chapter `tree` that `blank` takes out. Raises LookupError if they are not found."""
    node = find(tree, blank.where)
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if blank.inside is not None:
        body = body[select(body, blank.inside)].body
    first = 0 if blank.first is None else select(body, blank.first)
    last = len(body) - 1 if blank.last is None else select(body, blank.last)
    if last < first:
        raise LookupError(f"{blank.last} stands before {blank.first}")
    return body[first : last + 1]


def _opened(text: str, blank: Blank, hints: int) -> str:
    """The chapter's `text` with this blank in it. Raises LookupError for what is not found."""
    lines = text.split("\n")
    if blank.head:
        end = find(ast.parse(text), blank.where.partition(".")[0]).end_lineno
        lines[end:end] = [*blank.head.split("\n"), *_instead(blank, [], 8, hints)]
    else:
        taken = statements(ast.parse(text), blank)
        first, last, indent = taken[0].lineno - 1, taken[-1].end_lineno, taken[0].col_offset
        lines[first:last] = _instead(blank, lines[first:last], indent, hints)
    return "\n".join(lines)


def generate(name: str, hints: int = HINTS) -> str:
    """The text of the exercise: the chapter with its blanks. Above each stands its target, and so many of its hints.

    Raises LookupError, with the chapter, the function and the selector, for what is not in the chapter any more.
    """
    exercise = EXERCISES[name]
    text = (ROOT / exercise.source).read_text()
    for blank in exercise.blanks:
        try:
            text = _opened(text, blank, hints)
        except LookupError as error:
            where = f"{exercise.source}, {blank.where}"
            raise LookupError(f"{where}: {error}; change EXERCISES in harness/teach/exercise.py") from None
    lines, after = text.split("\n"), ast.parse(text).body[0].end_lineno  # the chapter's docstring, above all blanks
    lines[after:after] = ["", *_goal(name, exercise)]
    text = re.sub(r"^Run it: .*$", f"Check it: ./launch.sh check {name}", "\n".join(lines), count=1, flags=re.MULTILINE)
    return f"{text}\n{SEAL}{_digest(text)}\n"


SEAL = "# What is above as ./launch.sh exercise wrote it: "


def _digest(text: str) -> str:
    return hashlib.sha256(text.rstrip().encode()).hexdigest()[:16]


def edited(text: str) -> bool:
    """Whether somebody has changed the text of an exercise since it was written, from whatever reference."""
    before, _, seal = text.rpartition(SEAL)
    return seal.strip() != _digest(before)


def _instead(blank: Blank, taken: list[str], indent: int, hints: int) -> list[str]:
    target = blank.target.format(lines=sum(bool(line.strip()) and line.strip()[0] != "#" for line in taken))
    said = [*blank.hints[:hints], f"Target: {target}."]
    said[0] = f"{blank.step.upper()}. {said[0]}"
    comment = [line for part in said for line in textwrap.wrap(part, 117 - indent, break_on_hyphens=False)]
    return [
        *(f"{' ' * indent}# {line}" for line in comment),
        f'{" " * indent}raise NotImplementedError("{blank.task}")',
    ]


def _goal(name: str, exercise: Exercise) -> list[str]:
    said = [
        f"An exercise, made from {exercise.source}. In all it {exercise.goal}.",
        f"Write what raises NotImplementedError, in this order, which is that of work and not of lines, and ask after "
        f"each: ./launch.sh check {name}",
    ]
    lines = [line for part in said for line in textwrap.wrap(part, 117, break_on_hyphens=False)]
    lines += [f"  {blank.where:<24} {blank.task}" for blank in exercise.blanks]
    return [f"# {line}" for line in lines]


def told(name: str, text: str) -> str:
    """What is printed of an exercise that was written."""
    exercise = EXERCISES[name]
    places = enumerate(text.split("\n"), start=1)
    lines = {line.split('"')[1]: number for number, line in places if "raise NotImplementedError(" in line}
    blanks = [blank.task for blank in exercise.blanks]  # in the order to write them in
    return "\n".join(
        [
            f"written: exercises/{name}.py, {exercise.source} with {len(blanks)} blank{'s' * (len(blanks) > 1)}:",
            *(f"  line {lines[task]:>3}  {task}" for task in blanks),
            f"In all it {exercise.goal}.",
            f"Write them in this order, the order of work and not of lines. Ask after each: ./launch.sh check {name}",
            f"It takes about half a minute. A hint beside it: ./launch.sh check {name} --hint",
        ]
    )


def answer(parser: argparse.ArgumentParser):
    """Have `parser` answer a mistake in one line, with exit status 2."""

    def error(message):
        print(f"{parser.prog}: {message}", file=sys.stderr)
        sys.exit(2)

    parser.error = error
    return parser


def main(argv=None) -> None:
    parser = answer(argparse.ArgumentParser(prog="exercise", description=__doc__.splitlines()[0]))
    parser.add_argument("name", nargs="?", help=", ".join(EXERCISES))
    parser.add_argument("--hints", default=str(HINTS), metavar="0|1|2",
                        help=f"hints above each blank; 0: its target alone (default {HINTS})")  # fmt: skip
    parser.add_argument("--force", action="store_true", help="write it anew even if the file was edited")
    options = parser.parse_args(argv)
    if options.name not in EXERCISES:
        parser.error(f"which one? there are: {', '.join(EXERCISES)}" + f"; not {options.name!r}" * bool(options.name))
    if options.hints not in ("0", "1", "2"):
        parser.error(f"--hints must be 0, 1 or 2, got {options.hints!r}")
    file, text = FOLDER / f"{options.name}.py", generate(options.name, hints=int(options.hints))
    shown = file.relative_to(ROOT)
    if file.exists() and edited(file.read_text(errors="replace")) and not options.force:
        parser.error(f"{shown} is there and was edited; with --force it is written anew, and what you wrote is lost")
    FOLDER.mkdir(exist_ok=True)
    file.write_text(text)
    print(told(options.name, text))


if __name__ == "__main__":
    main()
