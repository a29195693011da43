"""What rank 0 prints of a training run: what it goes on from, what was saved, and how it has ended."""

import argparse
import threading

from harness.run.train_options import changed


def going_on(step: int, path, made: int, about: dict, options: argparse.Namespace) -> str:
    """After a checkpoint was loaded; `made` steps were made before, `about` was saved beside the weights."""
    again = f": {made - step} steps are made again" if step < min(made, options.steps) else ""
    lines = [f"going on after step {step}, from {path}{again}"]
    if news := changed(about.get("options", {}), options):
        lines.append(f"changed since step {step}: {', '.join(news)}")
    return "\n".join(lines)


def saved(step: int, first: bool, printed: threading.Event, save) -> None:
    """When the future `save` is done; on the `first` rank alone: what all ranks have written is there by then."""
    try:
        if first and not save.exception():
            one = save.result()
            nbytes = sum(file.stat().st_size for file in one.path.iterdir())
            took = f"{nbytes:,} bytes in {one.seconds:.1f} s; training stood still for {one.stood_still:.2f} s"
            print(f"saved step {step} to {one.path}: {took}\n", end="", flush=True)
    finally:
        printed.set()


def over(why: str, began: int, step: int, wanted: int) -> str:
    """The last line, of a run that `began` after that step and has come to `step` of `wanted`."""
    if why != "done":
        return f"{why}, after step {step} of {wanted}. The same line goes on from here"
    if began >= wanted:
        return f"already at step {began}, --steps is {wanted}: nothing to do. A larger --steps goes on from here"
    return f"done: {wanted} steps. A larger --steps goes on from here"
