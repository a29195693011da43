"""AdamW on the host: how long an update takes by each of torch's three ways, and how far a GPU's kernel is from it.

Run it: .venv/bin/python -m harness.measure.host_update
"""

import argparse
import json
import time

import torch

from harness.run import process_group

WAYS = {"one by one, the default": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
PIECES = 10  # tensors that the optimizer is handed


def update(elements: int, device: str = "cpu", **way) -> tuple[torch.optim.Optimizer, list[torch.Tensor]]:
    """(AdamW over float32 pieces of `elements` in all, the pieces), after its first step."""
    generator = torch.Generator().manual_seed(0)
    pieces = [torch.randn(elements // PIECES, generator=generator).to(device).requires_grad_() for _ in range(PIECES)]
    for piece in pieces:
        piece.grad = torch.randn(piece.shape, generator=generator).to(device)
    optimizer = torch.optim.AdamW(pieces, lr=1e-3, **way)
    optimizer.step()
    return optimizer, pieces


def nanoseconds(elements: int, ways: list[dict], repeats: int = 15) -> list[float]:
    """Time of one update on the host per element in each of `ways`: the quickest of `repeats`, which take turns."""
    optimizers, times = [update(elements, **way)[0] for way in ways], [[] for _ in ways]
    for _ in range(repeats):
        for optimizer, mine in zip(optimizers, times):
            began = time.perf_counter()
            optimizer.step()
            mine.append(time.perf_counter() - began)
    return [min(mine) / elements * 1e9 for mine in times]


def largest_difference(elements: int, steps: int = 10) -> float:
    """Between pieces that the host has updated and those that CUDA has, with equal gradients; both fused."""
    ends = []
    for device in ("cpu", "cuda"):
        optimizer, pieces = update(elements, device, fused=True)
        for _ in range(steps - 1):
            optimizer.step()
        ends.append([piece.detach().cpu() for piece in pieces])
    return max((here - there).abs().max().item() for here, there in zip(*ends))


def measure(elements: int) -> dict:
    found = dict(zip(WAYS, nanoseconds(elements, list(WAYS.values()))))
    default = found["one by one, the default"]
    return {
        "elements": elements,
        "threads": torch.get_num_threads(),
        "nanoseconds": {name: round(value, 3) for name, value in found.items()},
        "times_quicker": {name: round(default / value, 2) for name, value in found.items()},
        "host_from_cuda_after_10_steps": largest_difference(elements) if torch.cuda.is_available() else None,
        "hardware": process_group.hardware(torch.device("cpu")),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="host_update", description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=5_000_000, help="of the pieces together (default 5,000,000)")
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args()
    if options.elements < PIECES:
        parser.error(f"--elements must be {PIECES} or more, got {options.elements}")
    try:
        process_group.check_writable("--json", options.json)
    except ValueError as error:
        parser.error(str(error))
    results = measure(options.elements)
    print(f"AdamW over {options.elements:,} float32 elements, {results['threads']} thread(s), {results['hardware']}:")
    for name, value in results["nanoseconds"].items():
        print(f"  {name:<24} {value:6.2f} ns per element, {results['times_quicker'][name]:.1f} times as quick")
    apart = results["host_from_cuda_after_10_steps"]
    print(f"  host and CUDA are {apart:.1e} apart after 10 steps" if apart is not None else "  no GPU to compare with")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
