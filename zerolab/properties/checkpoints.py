"""Checkpoints: the same run goes on, in any stage at any number of ranks; what cannot be loaded changes nothing."""

import contextlib
import os
import pickle
import resource
import shutil
import tomllib
import warnings
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import keystr, tree_flatten_with_path

from zerolab.engine import checkpoint
from zerolab.engine.all_or_none import all_or_none
from zerolab.engine.checkpoint import contents, files
from zerolab.measure.held import sizes_of_layout
from zerolab.properties.fixtures import (
    ADAMW,
    EXACT,
    OPTIMIZERS,
    SGD,
    Averaging,
    Keeping,
    OddModel,
    a_step,
    a_step_on_vectors,
    grid,
    in_float64,
    pieces_of,
    plain_step,
    seeded,
    stack,
    three_groups,
    token_batch,
)
from zerolab.properties.property import ask, ask_thorough, expect, holds, only, refused, same
from zerolab.properties.shared_folder import shared_folder

SAVED = {
    **OPTIMIZERS,
    "fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "remembers": partial(Averaging, lr=0.05),
}
OPTIONS = {  # of a group: nested, or numpy's
    "number": numpy.float64(0.25),
    "dictionary": {"a": 1, "b": {"c": torch.ones(2), "none": None}},
    "empty": {},
    "numbered": {1: "a", 2: numpy.float32(0.5)},
    "tensor": torch.arange(3.0),
    "list": [1, {"a": (2.0, torch.zeros(1))}],
}


class Zoo(OddModel, Keeping):
    """All that a checkpoint must carry: uneven, tied, frozen, unused and empty parameters, buffers, 3 dimensions.

    And what a module keeps besides tensors.

    And, if `odd`, a scalar and an empty one, which FSDP2 does not take.
    """

    def __init__(self, odd: bool = True, norm=nn.BatchNorm1d):
        super().__init__(blocks=0)
        self.blocks.append(nn.Sequential(nn.Linear(5, 7, bias=False), norm(7), nn.Linear(7, 5)))
        self.blocks.append(nn.Sequential(nn.Linear(5, 9, bias=False), nn.Linear(9, 5)))
        self.mix = nn.Parameter(torch.randn(3, 5, 5) / 9)
        self.empty = nn.Parameter(torch.zeros(0, 5)) if odd else torch.zeros(0, 5)
        self.unused = nn.Linear(3, 3)
        self.register_buffer("table", torch.ones(5), persistent=False)
        self.scale = nn.Parameter(torch.tensor(0.7)) if odd else 0.7
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.kept = {"sums": {"a": 0.5}, "seen": [1]}

    def forward(self, tokens):
        x = self.embedding(tokens).mean(1) * self.frozen
        x = x + (self.shift * self.table).to(x.dtype)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        for matrix in self.mix:
            x = x + self.scale * (x @ matrix)
        return self.head(x + self.empty.sum())[:, :3].clone()


decayed_groups = partial(three_groups, apart="blocks.1")


def zoo_under(engine, optimizer=ADAMW, seed: int = 0, odd: bool = True, dtype=torch.float64, **options):
    norm = nn.LayerNorm if "param_dtype" in options else nn.BatchNorm1d  # torch's cannot compute in bfloat16 on a CPU
    model = seeded(partial(Zoo, odd, norm), seed, dtype)
    options = {"param_groups": decayed_groups(model), "find_unused": True, **options}
    if engine.like != "zero3":
        options = {"bucket_mb": 0.0005, **options}
    return engine(model, optimizer, **options)


def train(trained, steps) -> torch.Tensor:
    """A step on this rank's batch of each of `steps`; returns the losses."""
    return torch.stack([a_step(trained, step) for step in steps])


def state_of(trained, buffers: bool = False) -> dict:
    """Everything that loading may change, copied: {where it is: a tensor or a value}. All ranks take part.

    Buffers are every rank's own, and after loading rank 0's: only what is not loaded leaves them.
    """
    optimizer, state = trained.optimizer, {"weights": trained.full_state_dict()}
    state["shards"] = [bucket.shard for bucket in trained.all_buckets]
    state["buffers"] = list(trained.model.buffers()) if buffers else []
    for number, group in enumerate(optimizer.param_groups):
        state[number] = {key: value for key, value in group.items() if key != "params"}
        state[number]["pieces"] = [dict(optimizer.state.get(piece, {})) for piece in group["params"]]
    leaves = tree_flatten_with_path(state)[0]
    return {keystr(path): v.detach().clone() if torch.is_tensor(v) else v for path, v in leaves}


@holds(
    "life",
    ask(),
    ask("zero1", in_background=True),
    ask("zero3", mixed=True),
    only("zero2", optimizer="remembers"),
    *[ask_thorough("zero3", optimizer=name) for name in SAVED],
)
def a_loaded_run_is_the_uninterrupted_one(engine, optimizer="adamw", in_background=False, mixed=False):
    """A run that is loaded trains on to the bit as the one that was saved, on an engine that had trained otherwise.

    The same engine does the same operations on the same numbers. In mixed precision these are the float32 shards.
    """
    options = {"dtype": torch.float32, "param_dtype": torch.bfloat16} if mixed else {}
    trained, other = (zoo_under(engine, SAVED[optimizer], seed, **options) for seed in (0, 3))
    schedule, _ = (torch.optim.lr_scheduler.StepLR(each.optimizer, 2) for each in (trained, other))
    trained.optimizer.param_groups[0].update(OPTIONS)
    other.optimizer.param_groups[0].update(dict.fromkeys(OPTIONS))
    for step in range(3):
        a_step(trained, step)
        schedule.step()
    train(other, range(7, 9))
    extra = {"schedule": schedule.state_dict(), "rank": engine.rank, "random": torch.get_rng_state()}
    extra["keys"] = {1: (2, [3.0]), "5": {7: None, "numpy's": numpy.bool_(True)}}
    save = engine.more.get("save") or partial(checkpoint.async_save if in_background else checkpoint.save, **extra)
    expected = state_of(trained)
    with shared_folder() as folder:
        saved = save(trained, folder)
        ahead = train(trained, range(3, 6))  # a copy that is saved in the background must not see this
        saved = saved.result() if in_background else saved
        found = engine.more.get("load", checkpoint.load)(other, folder)
    # What is written is read: the same bytes, as text where it is none, which tells kinds as well.
    same("what was loaded", state_of(other), expected)
    read = {**OPTIONS, "number": 0.25, "numbered": {1: "a", 2: 0.5}}  # as Python's numbers
    same("the options", str({key: other.optimizer.param_groups[0][key] for key in OPTIONS}), str(read))
    same("what save returns", (saved.rank, saved.path), (engine.rank, folder / "000001"))
    same("a tensor of the caller's", found.pop("random"), extra.pop("random"))
    same("the caller's values, in any order", [found], [extra])
    same("the losses after loading", train(other, range(3, 6)), ahead)
    same("the state after training on", state_of(other), state_of(trained))


# Journeys. A station is who loads and saves, and on how many ranks; `file` is torch's conversion into one and back.
JOURNEY = "engine@3 other@2 file@1 engine@1 plain@1 engine@2"
BY_FSDP2 = "engine@3 fsdp2@2 engine@2"
TOLD = {"step": 3, "draws": torch.arange(3.0), "schedule": {"last": [0.1, 0.2], "by": "step"}}
ON_A_GRID = "grid@4 engine@4 grid@4 other@2"


@holds(
    "life",
    ask(("zero1", "zero3"), 3, more_ranks=(), journey=JOURNEY),
    ask("zero2", 4, journey=ON_A_GRID),
    ask_thorough(ranks=3, journey=BY_FSDP2),
)
def a_checkpoint_travels(engine, journey):
    """Loading and saving again changes no bit, whoever does it where; training comes out where one process does."""
    # The last ranks: in a group of some a rank has another number.
    groups = {size: dist.new_group(range(engine.size - size, engine.size)) for size in range(1, engine.size + 1)}
    odd, source, steps, told = "fsdp2" not in journey, None, 0, {}
    with shared_folder() as folder:
        for number, station in enumerate(journey.split()):
            kind, size = station.split("@")
            here, copied, group = folder / f"{number}", folder / f"{number} again", groups[int(size)]
            todo = range(steps, steps + 2 * (kind != "file"))
            if engine.rank >= engine.size - int(size):
                if kind in ("engine", "other", "grid"):
                    own = engine if kind != "other" else engine.another()
                    group = grid() if kind == "grid" else group
                    trained = zoo_under(own, seed=5 if source else 0, odd=odd, group=group)
                    if source:
                        found = checkpoint.load(trained, source)
                        same(f"the caller's values at station {number}, {kind}", found, told)
                        checkpoint.async_save(trained, copied, **found).result()
                    for step in todo:
                        trained.training_step(*token_batch(step, 0), in_float64)  # the same batch everywhere
                    checkpoint.save(trained, here, **TOLD)
                elif kind == "file":
                    dcp_to_torch_save(checkpoint.newest(source), f"{here}.pt")
                    torch_save_to_dcp(f"{here}.pt", here)
                else:
                    without_an_engine(kind == "fsdp2", group, source, here, todo, odd)
            dist.barrier()
            if copied.exists():
                same(f"what is saved again at station {number}, {kind}", flat(copied), flat(source))
            source, steps = here, todo.stop
            if kind != "file":  # torch's own classes know nothing of the caller's values
                told = {} if kind in ("plain", "fsdp2") else TOLD
        found = flat(source)
    model = seeded(lambda: Zoo(odd))
    optimizer = ADAMW(decayed_groups(model))
    for step in range(steps):
        plain_step(model, optimizer, step)
    expected = model.state_dict()
    same("the weights at the end", {key: found[key] for key in expected}, expected, EXACT)
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items() if param.numel() else ():
            same(f"{key} of {name} at the end", found[name, key], value, EXACT)


def state_by_torch(model, optimizer) -> dict:
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}


def without_an_engine(sharded: bool, group, source, folder, steps, odd: bool) -> None:
    """torch's own classes load, train and save."""
    model = seeded(partial(Zoo, odd), 5)
    if sharded:
        mesh = DeviceMesh.from_group(group, "cpu")
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
    optimizer = ADAMW(decayed_groups(model))
    state = state_by_torch(model, optimizer)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, checkpoint_id=checkpoint.newest(source), planner=planner, process_group=group)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"], options=StateDictOptions(strict=False))
    for step in steps:
        plain_step(model, optimizer, step)
    dcp.save(state_by_torch(model, optimizer), checkpoint_id=folder, process_group=group)


def flat(folder) -> dict:
    """All of a checkpoint by torch's own conversion, by name; without the order, and without who has written it.

    torch keeps a state for an empty parameter, and an engine has no piece of it.
    """
    file = f"{folder} of rank {dist.get_rank()}.pt"
    dcp_to_torch_save(checkpoint.newest(folder), file)
    state = torch.load(file, weights_only=True)
    found, optim = {**state["model"]}, state["optim"]
    for group in optim["param_groups"]:
        options = dict(sorted({**group, "params": None}.items()))
        found |= {(name, "group"): options for name in group["params"]}
    for name, own in optim["state"].items():
        found |= {(name, key): value for key, value in own.items()}
    found |= {(key, "dtype"): value.dtype for key, value in found.items() if torch.is_tensor(value)}
    return {key: found[key] for key in sorted(found, key=str) if "empty" not in key[0]}


class Runs:
    """Unpickling it makes a file."""

    def __init__(self, file: Path):
        self.file = str(file)

    def __reduce__(self):
        return open, (self.file, "w")


def of_other_runs(engine, folder: Path) -> None:
    """Checkpoints that an engine of a `Zoo` under AdamW must not load: they are of something else, or run code."""
    model = seeded(Zoo)
    adamw, sgd = ADAMW(decayed_groups(model)), torch.optim.SGD(decayed_groups(model), lr=0.01)
    evil = state_by_torch(model, adamw)
    for group in evil["optim"]["param_groups"]:
        group["lr"] = Runs(folder / "item ran")
    theirs = {
        "torch's SGD": state_by_torch(model, sgd),
        "an item that runs": evil,
        "weights alone": get_model_state_dict(model),
    }
    for name, state in theirs.items():
        dcp.save(state, checkpoint_id=folder / name)
    model.mix = nn.Parameter(torch.zeros(5, 3, 5, dtype=torch.float64))
    ours = {
        "Adam and not AdamW": zoo_under(engine, OPTIMIZERS["adam"]),
        "another dtype": zoo_under(engine, dtype=torch.float32),
        "fewer names": zoo_under(engine, odd=False),
        "other groups": zoo_under(engine, param_groups=None),
        "another shape": engine(model, ADAMW, param_groups=decayed_groups(model)),
    }
    for name, trained in ours.items():
        checkpoint.save(trained, folder / name)


# {checkpoint: [error, words of it]}
NOT_LOADED = tomllib.loads(Path(__file__).with_name("not_loaded.toml").read_text())
ERRORS = {each.__name__: each for each in (checkpoint.Damaged, checkpoint.Unsafe, FileNotFoundError, ValueError)}


def damage(good: Path, folder: Path) -> None:
    """Copies of the checkpoint `good` under the names of NOT_LOADED, each damaged in another way."""
    for name in NOT_LOADED:
        how, _, file = name.rpartition(" ")
        if how in ("flipped", "cut off", "without"):
            copied = shutil.copytree(good, folder / name) / file
            content = copied.read_bytes()
            if how == "flipped":
                copied.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            elif how == "cut off":
                copied.write_bytes(content[:-1])
            else:
                copied.unlink()
    copied = shutil.copytree(good, folder / "a list that runs")
    (copied / ".metadata").write_bytes(pickle.dumps(Runs(folder / "list ran")))
    (copied / "SHA256SUMS").unlink()


@holds("misuse")
def what_cannot_be_loaded_changes_nothing(engine):
    """A checkpoint that is damaged, of another run, or that runs code is refused; the next good one loads."""
    trained = zoo_under(engine)
    a_step(trained)
    with shared_folder() as folder:
        checkpoint.save(trained, folder / "good", step=1)
        good = state_of(trained)
        of_other_runs(engine, folder)
        if engine.rank == 0:
            damage(folder / "good" / "000001", folder)
        dist.barrier()
        a_step(trained, 1)
        before = state_of(trained, buffers=True)
        for name, (error, *words) in NOT_LOADED.items():
            with refused(*words, error=ERRORS[error]):
                checkpoint.load(trained, folder / name)
            same(f"the engine after {name!r}", state_of(trained, buffers=True), before)
        if engine.like == "zero3":
            with torch.device("meta"):
                model = Zoo().double()
            with refused("it asks for ", error=checkpoint.Unsafe):
                engine(model, ADAMW, state_dict=folder / "a list that runs")
        same("what a checkpoint has run", [path.name for path in folder.glob("* ran")], [])
        same("what was saved beside the weights", checkpoint.load(trained, folder / "good"), {"step": 1})
        same("what was loaded at last", state_of(trained), good)
        dist.barrier()
        # The two that run are what they are said to be: torch's own reader runs them.
        with contextlib.suppress(Exception):
            dcp.FileSystemReader(folder / "a list that runs").read_metadata()
        with contextlib.suppress(Exception):
            wanted = {"optim": {"param_groups": [{"lr": 0.0}]}}
            dcp.load(wanted, checkpoint_id=folder / "an item that runs", no_dist=True)
        assert (folder / "list ran").exists() and (folder / "item ran").exists()


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def no_space(*_):
    raise OSError(28, "No space left on device")


@contextlib.contextmanager
def files_of_at_most(nbytes: int):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@holds("misuse")
def what_one_rank_cannot_write_nobody_has(engine):
    """An error in one rank's files is one on all, in the same words; nothing is left over, and the last one is good."""
    trained, rank = zoo_under(engine), engine.rank
    a_step(trained)
    expected, said = state_of(trained), []
    with shared_folder() as folder:

        def save(to: str = "run"):
            return checkpoint.save(trained, folder / to, step=3)

        def save_in_background():
            return checkpoint.async_save(trained, folder / "run", step=1).result()

        save_in_background()  # so that its group is there: to make it takes the store, which may be a file
        a_step(trained, 1)
        with (
            files_of_at_most(2_000) if rank == 1 else contextlib.nullcontext(),
            warnings.catch_warnings(record=True, action="always") as warned,
        ):
            for each in (save_in_background, save):  # the thread warns a moment after its future has its error
                with refused("rank 1: ", "File too large", "earlier ones are as they were") as why:
                    each()
                said += why
        same("warnings of what fails in the background", ["rank 1: " in str(each.message) for each in warned], [True])
        dist.barrier()
        same("checkpoints after a full disk", names_in(folder / "run"), ["000001"])
        same("what was saved beside the weights", checkpoint.load(trained, folder / "run"), {"step": 1})
        same("what was loaded", state_of(trained), expected)
        save()
        same("checkpoints at last", names_in(folder / "run"), ["000001", "000002"])
        if rank == 0:
            (folder / "file").write_text("")
        dist.barrier()
        with patch.object(files, "_sync", no_space), refused("rank 0: ", "No space left") as why:
            save("full")
        said += why
        with patch.object(contents, "read", no_space), refused(error=checkpoint.Damaged) as why:
            save("unread")  # rank 0 looks whether the new checkpoint can be read
        said += why
        with refused("rank 0: ") as why:
            save("file")
        words = all_or_none(lambda: said + why, None)
        same("what the ranks say", words, [said + why] * engine.size)
        same("what is left", names_in(folder / "full") + names_in(folder / "unread"), [])


NOT_PLAIN = (  # what the option `note` or the caller's value is, and the name by which it is refused
    (len.__call__, "note"),
    ((x for x in ()), "note"),
    (numpy.zeros(2), "note"),
    ({"a": Runs(Path(os.devnull))}, "note.a"),  # whose copy opens that file
)
NOT_TOGETHER = (  # the optimizer's state of one parameter, on one rank alone or on all
    {"kept": torch.zeros(2, 2)},
    {"kept": [torch.zeros(2)]},
    {1: torch.zeros(2)},
    {"a": {"b": 1}, "a.b": 2},
)


@holds("misuse")
def what_cannot_be_loaded_is_not_saved(engine):
    """A value that could not be read again is refused by its name, on all ranks, before a folder is made."""
    rank = engine.rank
    with shared_folder() as folder:
        trained = zoo_under(engine, param_groups=None)
        other = checkpoint.save(trained, folder / "other").path
        folder = folder / "new"
        with refused("is a checkpoint itself", error=ValueError):
            checkpoint.save(trained, other)

        def refuses(*words: str, **values):
            with refused(*words, error=ValueError):
                checkpoint.save(trained, folder, **values)

        refuses("keep must be a number", keep=0)
        (group,) = trained.optimizer.param_groups
        for value, name in NOT_PLAIN:
            # Rank 0 alone has the option: the others say so all the same.
            group["note"] = value if rank == 0 else 1
            refuses(f"'optim.param_groups.0.{name}'")
            group["note"] = 1
            refuses("'what", ": a checkpoint takes tensors", what=value)
        group["lr"] = 0.01 + rank  # as where a schedule has gone by a rank's own loss
        refuses("ranks disagree on 'group 0'", "lr")
        group["lr"] = 0.01
        checkpoint.save(trained, other.parent)
        trained = zoo_under(engine, SGD, param_groups=None)
        state, pieces = trained.optimizer.state, pieces_of(trained)
        for own in NOT_TOGETHER:
            state[pieces[0]] = own
            refuses("in the optimizer's state")
        state["of all"] = {"steps": 1}
        refuses("'of all' in the optimizer's state")
        del state["of all"]
        for own in ({"kept": rank}, {"kept": {"a": 1} if rank else {}}):  # a parameter may lie on two ranks
            state.update(dict.fromkeys(pieces, own))
            refuses("ranks disagree on ")
        assert not folder.exists()


@holds("life")
def old_checkpoints_go(engine):
    """The newest `keep` checkpoints stay, also after kills, each loads by its name; the user's own is not touched."""
    trained = zoo_under(engine)
    first, users = engine.rank == 0, ["3notes.partial", "3song.partial"]
    with shared_folder() as folder:

        def save(step: int):
            checkpoint.save(trained, folder, keep=2, step=step)

        def there(when: str, *names: str):
            dist.barrier()
            same(f"what is in the folder {when}", names_in(folder), [*names, *users])
            dist.barrier()

        if first:
            (folder / users[0]).mkdir()
            (folder / users[1]).write_text("")
        save(1)
        if first:
            for number in (2, 3, 4):  # what runs leave that are killed before they delete
                shutil.copytree(folder / "000001", folder / f"{number:06d}")
        with patch.object(files, "_finish", no_space), refused("No space left"):
            save(4)  # which dies amid its save
        there("after a save that failed", "000003", "000004")
        save(5)
        save(6)
        there("then", "000005", "000006")
        same("what the older one holds", checkpoint.load(trained, folder / "000005"), {"step": 5})
        own = ["000008.partial", "000009.partial", "1²"]
        if first:
            (folder / own[0]).write_text("")
            (folder / own[1]).symlink_to(folder / users[0])
            (folder / own[2]).mkdir()
        dist.barrier()
        save(7)
        there("beside names of the user's", "000006", *own[:2], "000010", own[2])
        same("what the newest holds", checkpoint.load(trained, folder), {"step": 7})


@holds("bytes", ask(), ask(ranks=4, hybrid=True))
def each_rank_writes_its_part(engine, hybrid=False):
    """A rank writes its shards and their moments, and less than 110 kB of headers for each rectangle and option.

    ZeRO-1 and -2 have whole parameters, and each rank writes its shard of them all the same. Of replicas one writes.
    """
    trained = engine(stack(4, 256), ADAMW, group=grid() if hybrid else None)
    a_step_on_vectors(trained, 0, 256)
    with shared_folder() as folder:
        written = checkpoint.save(trained, folder).nbytes
    own = 0
    if not hybrid or engine.rank < 2:
        own = 3 * 4 * sizes_of_layout(trained)[1]
    most = own + 110_000
    expect(own < written < most, "bytes that this rank has written", f"{own:,} to {most:,}", f"{written:,}")
