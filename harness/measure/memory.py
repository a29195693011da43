"""Rank 0 of N without the other ranks: what one rank holds, sends and needs at the worst moment of a training step.

The real engines run on a process group that moves nothing ("fake"), with fake tensors, which have shapes, dtypes and
storages but no memory, or with real ones on a GPU. What is printed as measured comes from the ledgers that
watched the second step; formulas stand beside it. In them Ψ is the number of parameters, as in the ZeRO paper.

With --replicas the ranks stand in a grid (hybrid sharding), and what is sent is told apart by its two dimensions. With
--offload shards are on the host, whose bytes are told apart from the device's.

Run it: ./launch.sh memory --preset 7b --ranks 8
"""

import argparse
import contextlib
import gc
import multiprocessing
import re
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import CPUOffloadPolicy

import zero1
from harness.engine import accelerator
from harness.engine.units import by_size
from harness.measure import fake_gpu, tables
from harness.measure.fake_ranks import build, fake_ranks, grid, waiting
from harness.measure.gpus import CONTEXT_BYTES, GAPS, needed_bytes
from harness.measure.ledger import held_bytes, held_tensors, on_device, sizes_by_storage, warm_up
from harness.measure.memory_parts import HELD, PARTS, PartsLedger
from harness.measure.traffic import TrafficLedger
from harness.run import engines as registry
from harness.run import micro_batches, process_group
from harness.run import options as common
from harness.run.ending import one_line
from harness.run.model import GPT, GPTConfig, next_token_loss, number_of_parameters, preset
from harness.run.recompute import checkpoint_blocks

GPUS = (24, 40, 80, 141)  # GB of 10^9 bytes: RTX 4090, A100, A100 and H100, H200

# Bytes per parameter that a rank holds, (kept in full, cut into N): 4Ψ of weights, 4Ψ of gradients, 8Ψ of AdamW's two
# moments in float32. The article ARTICLE has this count as a table for 7e9 parameters on 8 GPUs. No article has the
# count for bf16 as it is here: bfloat16 weights (2Ψ) beside float32 ones (cut, where a stage cuts the optimizer state),
# float32 gradients. (In DDP and ZeRO-3 the bfloat16 weights exist only while the model computes.)
# One count for each number of things that are shared out: none, the optimizer state, the gradients too, all three.
FORMULAS = {
    "fp32": ((16, 0), (8, 8), (4, 12), (0, 16)),
    "bf16": ((16, 0), (6, 12), (2, 16), (0, 16)),
}
ARTICLE = '"AI in Multiple GPUs: ZeRO & FSDP"'

# The exact peak of each stage in bytes, for float32 and AdamW, without activations and temporaries. The chapters' heads
# have a shorter one, for buckets or units of equal size. All letters are numbers of elements (4 bytes each), but N, the
# number of ranks, and p, the units that are gathered ahead:
#   Ψ  all parameters                            G  the largest single gradient, on its way into ZeRO-1's buffer
#   U  the largest unit                          R  the root: the parameters of no unit
# and in ZeRO-2, for that bucket in backward which makes the sum largest:
#   B  this bucket; if it ends in a bias, also that bias's weight in the next bucket, whose gradient comes first
#   A  the larger of this bucket and the one that was reduced before it, which may still be in flight
#   T  this bucket and all that are reduced after it: their shards of the gradients do not exist yet
PEAK_FORMULAS = {
    "zero1": "8Ψ + 8Ψ/N + 4G",
    "zero2": "4Ψ + 8Ψ/N + 4(Ψ - T)/N + 4A + 4B",
    "zero3": "4(4Ψ - R - (p + 1)U)/N + 4R + 4(p + 3)U",
}
# With offload, on the device. A shard of the gradients is there until it is copied to the host: A/N or U/N. With
# replicas (N is then the ranks of a row) there are two such shards, as one is averaged over the replicas meanwhile.
OFFLOAD_PEAK_FORMULAS = {
    "zero1": "8Ψ + 4G",
    "zero2": "4Ψ + 4A + 4B + 4A/N",
    "zero3": "4R + 4(p + 3)U + 4U/N",
}
# With several backwards per step, from the second on: the shards of the gradients are all there, of the earlier ones,
# and a new shard is beside them until it is added.
ACCUMULATED_PEAK_FORMULAS = {
    "zero1": PEAK_FORMULAS["zero1"],
    "zero2": "4Ψ + 12Ψ/N + 4A + 4B + 4A/N",
    "zero3": "16Ψ/N + 4R + 4(p + 3)U + 4U/N",
}
NOT_EXACT = (
    "the formula is for one backward per step; gradients of earlier ones are held besides: up to 4Ψ/N and a shard"
)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = common.Parser(prog="memory", description=__doc__.splitlines()[0])
    common.add(parser, "preset", "seq", "checkpoint-activations", "json", preset="7b")
    parser.add_argument("--ranks", type=int, default=8, help="world size N (default 8)")
    parser.add_argument("--up-to", type=int, help="instead of --ranks: 1, 2, 4, ... up to so many ranks, peaks only")
    parser.add_argument("--replicas", type=int, default=1, help="hybrid sharding: N ranks in so many rows (default 1)")
    parser.add_argument("--offload", action="store_true", help="shards, their gradients and AdamW's state on the host")
    parser.add_argument("--precision", default="fp32", help="fp32 or bf16 (default fp32)")
    micro_batches.add_options(parser, 1)
    parser.add_argument("--engines", help=f"any of {', '.join(registry.named('memory'))}")
    parser.add_argument("--device", default="fake", help="fake: no memory is used; cuda (or xpu): real allocations")
    options = parser.parse_args(argv)
    common.settle(options, ranks=1, replicas=1, seq=1, up_to=1)
    micro_batches.settle(options, 1)
    if options.ranks > 10**6:
        raise ValueError(f"--ranks must be 1,000,000 or less, got {options.ranks}")
    if options.replicas > 1 and options.up_to is not None:
        raise ValueError(f"--replicas {options.replicas} wants one number of --ranks, not --up-to {options.up_to}")
    if options.ranks % options.replicas:
        raise ValueError(f"--replicas must divide --ranks, which is {options.ranks}, got {options.replicas}")
    if options.precision not in FORMULAS:
        raise ValueError(f"--precision must be {' or '.join(FORMULAS)}, got {options.precision!r}")
    there = accelerator.kind() if accelerator.count() else "cuda"
    if options.device not in ("fake", there):
        raise ValueError(f"--device must be fake or {there}, got {options.device!r}")
    if options.device != "fake" and not accelerator.count():
        raise ValueError(f"--device {there}, but torch sees no GPU here: use --device fake")
    if options.offload and options.device == "fake":
        fake_gpu.require()
    known = registry.named("memory")
    if options.offload:
        known = tuple(name for name in known if "offload_policy" in registry.ENGINES[name].takes)
        if "ddp" in (options.engines or "").split(","):
            why = "DDP has no offload: it cuts nothing"
            raise ValueError(f"no engine 'ddp' with --offload ({why}); there are: {', '.join(known)}")
    options.engines = registry.chosen(options.engines, "memory", known)
    return options


def evaluate(formula: str, **values: float) -> float:
    """The number that a formula such as "4(4Ψ - R)/N + 4(p + 3)U" has with these values of its letters."""
    return eval(re.sub(r"(?<=[\dΨ)]) ?(?=[(A-ZΨ])", "*", formula), {"__builtins__": {}}, values)


def letters(
    model: GPT, ranks: int, bucket_mb: float | None = None, prefetch: int = 1, offload: bool = False
) -> dict[str, float]:
    """What the letters of the peak's formulas stand for in a GPT (elements; N and p are numbers), without its engine.

    `ranks` are those to shard over.
    """
    named = list(model.named_parameters())
    units = [sum(param.numel() for param in block.parameters()) for block in model.blocks]
    total = sum(param.numel() for _, param in named)
    made = [zero1.Bucket(some, 0, ranks) for some in by_size(named, bucket_mb)]
    buckets, early = [bucket.numel for bucket in made], [0] * len(made)
    for number, (bucket, behind) in enumerate(zip(made, made[1:])):
        if bucket.names[-1].rpartition(".")[0] == behind.names[0].rpartition(".")[0]:
            early[number] = behind.params[0].numel()  # the weight of that bias: its gradient comes first
    # Every bucket with the larger of it and the one before, and with all that is reduced from it on.
    ahead = [max(buckets[max(0, i - 1) : i + 1]) for i in range(len(buckets))]
    lines = [(ahead[i], buckets[i] + early[i], sum(buckets[i:])) for i in range(len(buckets))]
    before, bucket, tail = max(lines, key=lambda line: line[0] + line[1] - (0 if offload else line[2] / ranks))
    prefetch = 0 if ranks == 1 else max(0, min(prefetch, len(units) - 2))
    return {"Ψ": total, "N": ranks, "G": max(param.numel() for _, param in named), "A": before, "B": bucket,
            "T": tail, "U": max(units), "R": total - sum(units), "p": prefetch}  # fmt: skip


def make_model(config: GPTConfig, device: torch.device) -> GPT:
    """A GPT with weights of the right size; on a GPU drawn there, as their values do not matter here."""
    with torch.device("meta") if is_gpu(device) else device:
        model = GPT(config)
    if is_gpu(device):
        model.to_empty(device=device)
        model.head.weight = model.tokens.weight  # to_empty takes tied weights apart
        for param in model.parameters():
            nn.init.normal_(param, std=0.02)
    return model


def measure(name: str, options: argparse.Namespace) -> dict:
    """One engine's row, of the second step: the first makes the optimizer's state. Needs a process group.

    On a GPU that is too small: {"out_of_memory": torch's words}.
    """
    device = torch.device("cpu") if options.device == "fake" else torch.device(options.device, 0)
    if options.offload and options.device == "fake":
        device = fake_gpu.register()
    try:
        with waiting(device):
            return _measure(name, options, device)
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": str(error).split(". ")[0]}
    finally:
        gc.collect()
        if is_gpu(device):
            torch.accelerator.empty_cache()


def _measure(name: str, options: argparse.Namespace, device: torch.device) -> dict:
    config, dtype, real = preset(options.preset), registry.DTYPES[options.precision], options.device != "fake"
    offload, shards = options.offload, options.ranks // options.replicas
    # Made before there are fake tensors, which have no values to make it of.
    mesh = None
    if options.replicas > 1 and "mesh" in registry.ENGINES[name].takes:
        mesh = grid(options.ranks, options.replicas, device.type)
    # Fake tensors cannot be pinned: what pinned memory takes besides is computed, by `pinned_bytes`.
    policy = CPUOffloadPolicy(pin_memory=real) if offload else None
    # foreach, CUDA's default, allocates intermediates as large as the parameters, which is no engine's doing. On the
    # host fused is the quick one, and makes none.
    adamw = partial(torch.optim.AdamW, lr=1e-4, foreach=False, fused=offload or is_gpu(device))
    if is_gpu(device):
        warm_up(device)
    allocator = allocator_of(device)
    before = allocator.memory_allocated() if allocator else 0
    held, held_on_host, here = {}, {}, device.type if offload else None
    fake = contextlib.nullcontext() if real else FakeTensorMode(allow_non_fake_inputs=True)
    on_host = PartsLedger(device="cpu") if offload else contextlib.nullcontext()
    with fake, PartsLedger(device=here) as memory, on_host as host:
        model = make_model(config, device)
        if options.checkpoint_activations:
            checkpoint_blocks(model, casts=registry.ENGINES[name].casts and dtype is not None)
        values = letters(model, shards, offload=offload or options.accumulate > 1)  # then T does not count
        engine = build(name, model, adamw, device, dtype=dtype, mesh=mesh, offload_policy=policy)
        del model
        tokens = torch.zeros(options.batch, options.seq + 1, dtype=torch.int64, device=device)
        batch = tokens[:, :-1], tokens[:, 1:], next_token_loss, options.accumulate
        micro_batches.training_step(engine, *batch)
        if name == "ddp" and real:
            micro_batches.training_step(engine, *batch)  # in its second step DDP makes its buckets anew, for once
        memory.begin(engine)
        engine.optimizer.register_step_pre_hook(lambda *_: held.update(held_bytes(engine, here)))
        if offload:
            host.begin(engine)
            engine.optimizer.register_step_pre_hook(
                lambda *_: held_on_host.update(held_bytes(engine, "cpu"), pinned=pinned_bytes(engine))
            )
        if allocator:
            allocator.reset_peak_memory_stats()
        with TrafficLedger() as traffic:
            micro_batches.training_step(engine, *batch)
        allocated = allocator.max_memory_allocated() - before if allocator else None
        pieces = sum(len(group["params"]) for group in engine.optimizer.param_groups)
        engine = None  # the hooks have it, too
    sent: dict[tuple, dict] = {}
    for collective in traffic.collectives:
        of = {"kind": collective.kind, "where": dimension(collective.ranks, options)}
        one = sent.setdefault((*of.values(),), of | {"bytes": 0, "elements": 0, "count": 0})
        one["bytes"] += collective.sent_bytes
        one["elements"] += collective.sent_elements
        one["count"] += 1
    formula, host_formula = (round(values["Ψ"] * number) for number in bytes_per_parameter(name, options))
    peak_formula = formula_of_peak(name, options, values)
    result = {
        "held_bytes": held,
        "formula_bytes": formula,
        "difference_bytes": sum(held.values()) - formula,
        "step_counters_bytes": 0 if offload else 4 * pieces,  # AdamW counts its steps per tensor, in float32
        **worst_moment(memory, allocated),
        "temporaries": dict(memory.peak_moment().made.most_common(4)),
        "state_peak_bytes": memory.peak_moment(of=lambda moment: moment.state).state,
        "state_peak_formula": peak_formula,
        "state_peak_formula_bytes": round(evaluate(peak_formula, **values)) if peak_formula else None,
        "sent_bytes": traffic.sent_bytes,
        "sent_elements": traffic.sent_elements,
        "sent": [one | {key: round(one[key]) for key in ("bytes", "elements")} for one in sent.values()],
        "curve": curve(memory),
    }
    if offload:
        pinned = held_on_host.pop("pinned")
        most, together = host.peak_moment(of=_beside), sum(held_on_host.values())
        result["host"] = {
            "held_bytes": held_on_host,
            "formula_bytes": host_formula,
            "difference_bytes": together - host_formula,
            "step_counters_bytes": 4 * pieces,
            **worst_moment(host),
            "pinned_bytes": pinned,  # of parameters and gradients, were they pinned
            "most_beside_bytes": _beside(most),  # at any moment, of anything but what is held
        }
    if name == "ddp" and not real:
        result["stand_in"] = True
    return result


def allocator_of(device: torch.device):
    """torch's module that knows the peak of a real GPU's allocator; None where tensors are fake."""
    return torch.accelerator if is_gpu(device) else None


def is_gpu(device: torch.device) -> bool:
    """Whether it has memory: neither the CPU, where tensors are fake, nor the fake GPU."""
    return device.type not in ("cpu", fake_gpu.NAME)


def worst_moment(ledger: PartsLedger, allocated: int | None = None) -> dict:
    """The peak as a row has it. With `allocated`, the allocator's own peak, that is it, and the ledger's is beside."""
    peak = ledger.peak_moment()
    row = {
        "peak_bytes": peak.live if allocated is None else allocated,
        "peak_where": {"step": peak.step, "module": peak.module},
        "peak_parts": {part: peak.parts[part] for part in PARTS if peak.parts[part]},
    }
    return row if allocated is None else {**row, "ledger_peak_bytes": peak.live}


def pinned_bytes(engine) -> int:
    """What the parameters and gradients on the host take if they are pinned.

    torch keeps pinned blocks to use them again, and makes each a power of two: a buffer of 100 MB takes 134.
    """
    held = held_tensors(engine)
    sizes = sizes_by_storage(on_device([*held["parameters"], *held["gradients"]], "cpu"))
    return sum(1 << (nbytes - 1).bit_length() for nbytes in sizes.values() if nbytes)


def _beside(moment) -> int:
    return moment.live - sum(moment.parts[part] for part in HELD)


def bytes_per_parameter(name: str, options: argparse.Namespace) -> tuple[float, float]:
    """What `name` holds by the formulas, in bytes per parameter: (on the device, on the host)."""
    shared_out, _ = registry.ENGINES[name].promise
    whole, cut = FORMULAS[options.precision][len(shared_out)]
    shards = options.ranks // options.replicas
    if options.offload:  # everything that is cut: float32 weights, gradients and AdamW's two moments
        return whole, 16 / shards
    if name == "zero1" and options.replicas > 1:
        cut += 4  # a shard of the gradients, averaged over the replicas, beside the row's whole ones
    return whole + cut / shards, 0


def formula_of_peak(name: str, options: argparse.Namespace, values: dict[str, float]) -> str | None:
    """The stage's formula of the peak without activations. None for other engines, and for mixed precision."""
    if name not in PEAK_FORMULAS or options.precision != "fp32":
        return None
    if options.offload:
        formula = OFFLOAD_PEAK_FORMULAS[name]
        return formula if options.replicas == 1 else formula.replace("4A/N", "8A/N").replace("4U/N", "8U/N")
    if options.accumulate > 1 and options.replicas == 1:
        return ACCUMULATED_PEAK_FORMULAS[name]
    if name == "zero1" and options.replicas > 1:
        in_step_3 = "8Ψ + 12Ψ/N"  # beside the whole gradients lies the shard of them that the replicas have averaged
        return max(PEAK_FORMULAS[name], in_step_3, key=lambda formula: evaluate(formula, **values))
    return PEAK_FORMULAS[name]


def dimension(ranks: tuple[int, ...], options: argparse.Namespace) -> str:
    """Where a collective of these ranks runs in the grid: "row", "across replicas", or "all ranks"."""
    if options.replicas == 1 or len(ranks) == options.ranks and options.replicas != options.ranks:
        return "all ranks"
    return "row" if ranks == tuple(range(options.ranks // options.replicas)) else "across replicas"


def curve(memory: PartsLedger, points: int = 120) -> dict[str, list]:
    """The step as a line: `points` stretches per phase, of each the moments with the most and the least alive.

    {"phase": ["1 forward", ...], "progress": [0 to 1 within the phase], part: [MB], ...}, MB being 10^6 bytes.
    """
    phases: dict[str, list] = {}
    for moment in memory.moments():
        if moment.phase:
            phases.setdefault(moment.phase, []).append(moment)
    result = {"phase": [], "progress": [], **{part: [] for part in PARTS}}
    for phase, moments in phases.items():
        stretch = max(1, -(-len(moments) // points))
        for start in range(0, len(moments), stretch):
            numbers = range(start, min(start + stretch, len(moments)))
            ends = {pick(numbers, key=lambda number: moments[number].live) for pick in (min, max)}
            for number in sorted(ends):
                result["phase"].append(phase)
                result["progress"].append(round(number / len(moments), 4))
                for part in PARTS:
                    result[part].append(round(moments[number].parts[part] / 1e6, 2))
    return result


def measure_all(options: argparse.Namespace, say=lambda text: None, keep=lambda results: None) -> dict:
    """Every engine of `options`, one after the other: the JSON of `./launch.sh memory`. `keep` gets it after each."""
    of = ("ranks", "replicas", "preset", "precision", "offload", "batch", "accumulate", "seq", "checkpoint_activations",
          "device")  # fmt: skip
    results = {"parameters": number_of_parameters(preset(options.preset))} | {name: vars(options)[name] for name in of}
    hardware = process_group.hardware(torch.device("cpu" if options.device == "fake" else options.device))
    engines = {}
    about = {"hardware": hardware, "torch": torch.__version__, "command": common.command("memory"), "engines": engines}
    results |= about
    with fake_ranks(options.ranks):
        for name in options.engines:
            started = time.perf_counter()
            engines[name] = measure(name, options)
            if options.device != "fake":  # beside the GPU's row, what fake tensors say
                fake = argparse.Namespace(**vars(options) | {"device": "fake"})
                row = measure_apart(name, fake) if options.offload else measure(name, fake)
                engines[name]["dry_run_peak_bytes"] = row["peak_bytes"]
            say(f"  {name}: {time.perf_counter() - started:.1f} s")
            keep(results)
    return results


def measure_apart(name: str, options: argparse.Namespace) -> dict:
    """`measure` in a process of its own: a fake GPU stays where it is registered, and must not be beside a real one."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(measure_alone, name, options).result()


def measure_alone(name: str, options: argparse.Namespace) -> dict:
    """`measure` where there is no process group yet."""
    with fake_ranks(options.ranks):
        return measure(name, options)


def measure_up_to(options: argparse.Namespace, say=lambda text: None) -> dict:
    """Every engine at N = 1, 2, 4, ... ranks: {..., "ranks": [N, ...], "engines": {name: [row, ...]}}."""
    unit, size = tables.unit(4 * number_of_parameters(preset(options.preset)))
    numbers = [2**power for power in range(options.up_to.bit_length())]
    engines = {name: [] for name in options.engines}
    for options.ranks in numbers:
        peaks = []
        results = measure_all(options)
        for name, row in results["engines"].items():
            row.pop("curve", None)
            engines[name].append(row)
            no_memory = "out_of_memory" in row
            peaks.append(f"{name} {'OUT OF MEMORY' if no_memory else format(row['peak_bytes'] / size, '.2f')}")
        say(f"  {options.ranks:>5} rank{'s' if options.ranks > 1 else ' '}, peak in {unit}: " + ", ".join(peaks))
    return {**results, "ranks": numbers, "engines": engines}


def fits_on(peak: float) -> list[int]:
    """The GPUs, in GB, on which a peak of so many live bytes fits, by the planner's rule."""
    return [gigabytes for gigabytes in GPUS if needed_bytes(peak) <= gigabytes * 1e9]


def formula_name(results: dict) -> str:
    """What the column "formula" is: an article's bytes per parameter, or this project's own count."""
    if results.get("offload"):
        return "our count of what it keeps whole"
    if results.get("replicas", 1) > 1:
        return "our count: what is cut is divided by the ranks of a row"
    own = "our count: bfloat16 weights, float32 weights to update, float32 gradients"
    return f"the formula of {ARTICLE}" if results["precision"] == "fp32" else own


def report(results: dict) -> str:
    """The tables as text. GB are 10^9 bytes, MB 10^6."""
    engines, ranks, parameters = results["engines"], results["ranks"], results["parameters"]
    unit, size = tables.unit(4 * parameters)
    lines = [f"GPT {results['preset']}: Ψ = {parameters:,} parameters, {4 * parameters / size:.3f} {unit} in float32"]
    ran = {name: row for name, row in engines.items() if "out_of_memory" not in row}
    name_of = {name: name + (" (stand-in)" if row.get("stand_in") else "") for name, row in engines.items()}

    on_device = " on the device" if results["offload"] else ""
    held = f"Held{on_device} by one rank with the gradients of a finished backward, {unit}"
    lines += ["", f"{held}, beside {formula_name(results)}:"]
    lines += _held({name_of[name]: row for name, row in ran.items()}, size)
    if results["offload"]:
        held = f"Held on the host likewise, {unit}"
        lines += ["", f"{held}, beside 16 bytes per parameter, divided by the ranks that shard:"]
        lines += _held({name: row["host"] for name, row in ran.items()}, size)
        pinned = "Parameters and gradients in pinned memory, each buffer rounded up to a power of two"
        for what, key in (("At the worst moment of the step", "peak_bytes"), (pinned, "pinned_bytes")):
            lines += [f"  {what}: " + ", ".join(f"{name} {row['host'][key] / size:.3f}" for name, row in ran.items())]

    lines += ["", f"At the worst moment of the step{on_device}, {unit}:"]
    short = {"gathered units": "gathered", "gradients in flight": "in flight", "batch and buffers": "batch"}
    rows = [["engine", "peak", "step", "module", *(short.get(part, part) for part in PARTS)]]
    for name, row in ran.items():
        where = row["peak_where"]
        parts = [f"{row['peak_parts'].get(part, 0) / size:.3f}" for part in PARTS]
        rows.append([name_of[name], f"{row['peak_bytes'] / size:.3f}", where["step"], where["module"] or "-", *parts])
    lines += tables.text(rows, left=(0, 2, 3), rule=False)
    for name, row in ran.items():
        made = ", ".join(f"{operation} {nbytes / size:.3f}" for operation, nbytes in row["temporaries"].items())
        lines.append(f"  {name}: temporaries made by {made}" if made else f"  {name}: no temporaries")
        beside = {"ledger_peak_bytes": "live storages, whose parts these are", "dry_run_peak_bytes": "the dry run"}
        for other, what in beside.items():
            if other in row:
                off = f"{row['peak_bytes'] / row[other] - 1:+.2%}"
                lines.append(f"  {name}: the allocator's peak is {off} from {what} ({row[other] / size:.3f} {unit})")

    stages = {name: row for name, row in ran.items() if row["state_peak_formula"]}
    if stages:
        lines += ["", f"Without activations and temporaries, {unit}, beside the stage's own formula:"]
        rows = [["engine", "peak", "formula", "off by", "which is, in bytes"]]
        for name, row in stages.items():
            measured, formula = row["state_peak_bytes"], row["state_peak_formula_bytes"]
            off = f"{measured / formula - 1:+.3%}"
            rows.append([name, f"{measured / size:.3f}", f"{formula / size:.3f}", off, row["state_peak_formula"]])
        lines += tables.text(rows, left=(0, 4), rule=False)
        if results.get("accumulate", 1) > 1 and results["replicas"] > 1 and not results["offload"]:
            lines.append(f"  ({NOT_EXACT})")
        lines += [
            "  Elements: Ψ all parameters, G the largest gradient, U the largest unit, R the root (what no unit has);",
            "  A, B, T of buckets (PEAK_FORMULAS in harness/measure/memory.py says which). p: units gathered ahead.",
        ]
        if results["replicas"] > 1:
            lines.append(f"  N here: the ranks of a row, {ranks // results['replicas']}.")
    elif results["precision"] != "fp32" and any(name.startswith("zero") for name in ran):
        lines += ["", "The stages' formulas for the peak are for fp32."]

    times = f"Ψ times (N-1)/N = {ranks - 1}/{ranks}" if results["replicas"] == 1 else "in shares of Ψ"
    lines += ["", f"Sent by one rank in the step, {unit} (elements: {times}), and in how many collectives:"]
    lines += _sent({name_of[name]: row for name, row in ran.items()}, results, size)

    needed = f"the peak, {GAPS:.0%} more for the allocator's gaps, and {CONTEXT_BYTES / 1e9:.0f} GB"
    lines += ["", f"On which GPUs it fits (GB of 10^9 bytes; needed: {needed}"]
    lines += ["for CUDA and NCCL, all assumed as in ./launch.sh plan):"]
    for name, row in engines.items():
        if "out_of_memory" in row:
            lines.append(f"  {name_of[name]}: OUT OF MEMORY here. {row['out_of_memory']}")
            continue
        fits = fits_on(row["peak_bytes"])
        answer = f"from {fits[0]} GB on" if fits else "on none of them"
        lines.append(f"  {name_of[name]}: {answer}, {needed_bytes(row['peak_bytes']) / 1e9:.1f} GB are needed")
    return "\n".join(lines)


def _held(engines: dict[str, dict], size: float) -> list[str]:
    """What is held, in columns; `engines` are rows by the name to show."""
    rows = [["engine", "parameters", "gradients", "optimizer", "together", "formula", "difference, bytes"]]
    for name, row in engines.items():
        held = row["held_bytes"].values()
        rest = row["difference_bytes"] - row["step_counters_bytes"]
        difference = f"{row['difference_bytes']:+,} = {row['step_counters_bytes'] // 4:,} step counters of 4 bytes"
        difference += f" {rest:+,} padding" if rest else ""
        numbers = [f"{nbytes / size:.3f}" for nbytes in (*held, sum(held), row["formula_bytes"])]
        rows.append([name, *numbers, difference])
    return tables.text(rows, rule=False)


def _sent(engines: dict[str, dict], results: dict, size: float) -> list[str]:
    """What is sent, in columns: by the kinds of collectives, or with replicas by the two dimensions of the grid."""
    parameters, ranks, replicas = (results[name] for name in ("parameters", "ranks", "replicas"))
    shards, by = ranks // replicas, "kind" if replicas == 1 else "where"
    everywhere = parameters * (ranks - 1) / ranks, "Ψ" if replicas == 1 else "Ψ (N-1)/N"
    units = dict.fromkeys(("together", "all-reduce", "reduce-scatter", "all-gather", "broadcast"), everywhere)
    if replicas > 1:  # across them a rank sends only its shard
        units = {"together": everywhere, "row": (parameters * (shards - 1) / shards, "Ψ (S-1)/S")}
        units["across replicas"] = parameters / shards * (replicas - 1) / replicas, "Ψ/S (R-1)/R"
        units["all ranks"] = everywhere
    used = {"together", *(one[by] for row in engines.values() for one in row["sent"])}
    units = {column: unit for column, unit in units.items() if column in used}
    rows = [["engine", *units]]
    for name, row in engines.items():
        rows.append([name])
        for column, (unit, words) in units.items():
            mine = [one for one in row["sent"] if column in ("together", one[by])]
            nbytes, elements, count = (sum(one[what] for one in mine) for what in ("bytes", "elements", "count"))
            times = f" ({elements / unit:.3f} {words})" if unit else ""
            rows[-1].append(f"{nbytes / size:.3f}{times} in {count}" if count else "-")
    grid = f"  N = {ranks} ranks are R = {replicas} rows of S = {shards} ranks, replicas of each other."
    return tables.text(rows, rule=False) + [grid] * (replicas > 1)


def main() -> None:
    with one_line(ValueError):
        options = arguments()
    print(__doc__.splitlines()[0])
    what = "fake tensors, which take no memory" if options.device == "fake" else "real allocations on the GPU"
    batch = f"{options.batch} sequence(s) of {options.seq} tokens per rank{micro_batches.words(options)}"
    extra = ", activations checkpointed" if options.checkpoint_activations else ""
    extra += ", offload to the host" if options.offload else ""
    ranks = options.ranks if options.up_to is None else f"1 to {options.up_to}"
    say = partial(print, flush=True)
    rows = f" in {options.replicas} rows" if options.replicas > 1 else ""
    say(f"Rank 0 of {ranks}{rows} on {what}; {options.precision}, AdamW, {batch}{extra}; the second step.")
    if options.up_to is None:
        results = measure_all(options, say, partial(common.write_json, options.json, indent=None))
        print("\n" + report(results))
    else:
        results = measure_up_to(options, say)
    common.write_json(options.json, results, indent=None)
    if options.json:
        print(f"\nwritten: {options.json}")


if __name__ == "__main__":
    process_group.run(main)
