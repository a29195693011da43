"""Builds the simulated libraries beside an installation of torch, which stays as it is."""

import hashlib
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution, version
from pathlib import Path

HERE = Path(__file__).resolve().parent
# What has nothing to do here, and is called: it succeeds. Whatever else the libraries lack fails, and says which it is.
NOTHING = {
    *("cudaStreamDestroy", "cudaThreadExchangeStreamCaptureMode", "__cudaInitModule", "__cudaUnregisterFatBinary"),
    *("__cudaRegisterFatBinaryEnd", "__cudaRegisterVar", "__cudaRegisterManagedVar", "cuInit"),
    *("ncclGroupStart", "ncclGroupEnd", "ncclCommFinalize", "ncclCommDestroy", "ncclRedOpDestroy"),
}
SOURCES = ["simulated.h", "runtime.cpp", "nccl.cpp", "kernels.cpp", "driver.cpp", "build.py"]


class Missing(Exception):
    """What is needed and not there, in one line."""


def libraries() -> Path:
    """The folder with the four libraries, built if it is not there yet: a minute at most."""
    site = Path(distribution("torch").locate_file(""))
    if not (site / "torch/lib/libtorch_cuda.so").exists():
        raise Missing(
            f"simulated GPUs need a CUDA build of torch, and {sys.executable} has {version('torch')}: make an "
            "environment with `pip install -r requirements-cuda.txt` (5 GB), and set PYTHON to its Python"
        )
    if not (shutil.which("g++") and shutil.which("nm")):
        raise Missing("simulated GPUs need a C++ compiler, and there is no g++ (on Debian and Ubuntu: apt install g++)")
    contents = [(HERE / name).read_bytes() for name in SOURCES]
    key = hashlib.sha256(b"".join([*contents, str(site).encode(), version("torch").encode()])).hexdigest()[:16]
    folder = HERE / "build" / key
    if not folder.exists():
        print("building the simulated libraries (once)", flush=True)
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        _build(site, part)
        part.rename(folder)
    return folder


def _build(site: Path, folder: Path) -> None:
    cuda, nccl, torch = site / "nvidia/cu13", site / "nvidia/nccl", site / "torch"
    includes = [f"-I{path}" for path in (cuda / "include", nccl / "include", torch / "include")]
    # NCCL's header would include these for names of types that it does not use.
    skip = [f"-D__CUDA_{kind}_H__" for kind in ("FP16", "BF16", "FP8")]

    def run(*command) -> str:
        done = subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise Missing(f"{command[0]} failed:\n{done.stderr[-4000:]}")
        return done.stdout

    def compile(name: str, *more) -> None:
        run("g++", "-O2", "-std=c++20", "-fPIC", "-w", *includes, *more, "-c", HERE / f"{name}.cpp", "-o", f"{name}.o")

    def names(library: Path, *which: str) -> set[str]:
        return {line.split()[-1].split("@")[0] for line in run("nm", *which, library).splitlines()}

    def link(out: str, name: str, wanted: set[str], *more) -> None:
        """A library with all names that are `wanted`, also those that `name`.o lacks."""
        bodies = {
            each: "0" if each in NOTHING else f'simulated_missing("{each}")'
            for each in sorted(wanted - names(folder / f"{name}.o", "--defined-only"))
        }
        stubs = "".join(f"int {each}(void) {{ return {body}; }}\n" for each, body in bodies.items())
        (folder / f"{out}.c").write_text("int simulated_missing(const char*);\n" + stubs)
        shared = ["g++", "-shared", "-fPIC", "-w", "-Wl,-rpath,$ORIGIN", f"-Wl,-soname,{out}"]
        run(*shared, "-x", "c", f"{out}.c", "-x", "none", f"{name}.o", "-o", out, *more)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda job: compile(*job), [("kernels",), ("runtime",), ("driver",), ("nccl", *skip)]))
    exported = ["-D", "--defined-only"]
    (folder / "versions").write_text("libcudart.so.13 { global: *; };")
    wanted = {name for name in names(cuda / "lib/libcudart.so.13", *exported) if not name.startswith("libcudart")}
    link("libcudart.so.13", "runtime", wanted, "-Wl,--version-script=versions")
    beside = ["-L.", "-l:libcudart.so.13"]
    wanted = {name for name in names(nccl / "lib/libnccl.so.2", *exported) if name.startswith(("nccl", "pnccl"))}
    link("libnccl.so.2", "nccl", wanted, *beside)
    # Of the driver torch needs little, and asks one thing: has this process begun to use a device?
    wanted = {
        name for name in names(torch / "lib/libcaffe2_nvrtc.so", "-D", "--undefined-only") if name.startswith("cu")
    }
    link("libcuda.so.1", "driver", wanted, *beside)
    run("g++", "-shared", "kernels.o", "-o", "libkernels.so", "-Wl,-rpath,$ORIGIN", *beside, f"-L{torch / 'lib'}",
        "-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch_cuda")  # fmt: skip
