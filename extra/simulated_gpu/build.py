"""Build the simulated libraries for an installation of torch, which does not change."""

import hashlib
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution, version
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Functions that are called and have nothing to do here: they succeed. Any other missing function fails with its name.
NOTHING = {
    *("cudaStreamDestroy", "cudaThreadExchangeStreamCaptureMode", "__cudaInitModule", "__cudaUnregisterFatBinary"),
    *("__cudaRegisterFatBinary", "__cudaRegisterFatBinaryEnd", "__cudaRegisterFunction", "__cudaRegisterVar"),
    *("__cudaRegisterManagedVar", "cuInit"),
    *("ncclGroupStart", "ncclGroupEnd", "ncclCommFinalize", "ncclCommDestroy"),
}
# NCCL's header would include these for names of types that it does not use.
SKIP = [f"-D__CUDA_{kind}_H__" for kind in ("FP16", "BF16", "FP8")]
SOURCES = ["runtime.cpp", "nccl.cpp", "kernels.cpp"]


def fail(text: str):
    """Exit with one line: what is wrong and what to do."""
    print(f"error: {text}", file=sys.stderr)
    sys.exit(2)


def libraries() -> Path:
    """The folder with the libraries. Builds it if it does not exist, in at most a minute."""
    site = Path(distribution("torch").locate_file(""))
    if not (site / "torch/lib/libtorch_cuda.so").exists():
        fail(
            f"simulated GPUs need a CUDA build of torch, and {sys.executable} has {version('torch')}. Make "
            "an environment with `pip install -r extra/simulated_gpu/requirements.txt` (5 GB), and set PYTHON to its "
            "Python"
        )
    if not (shutil.which("g++") and shutil.which("nm")):
        fail("simulated GPUs need the C++ compiler g++, which is not installed (on Debian and Ubuntu: apt install g++)")
    contents = [(HERE / name).read_bytes() for name in (*SOURCES, "simulated.h", "build.py")]
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
    compile = ["g++", "-O2", "-std=c++20", "-fPIC", "-w", *SKIP, "-c"]
    compile += [f"-I{path / 'include'}" for path in (cuda, nccl, torch)]
    link = ["g++", "-shared", "-fPIC", "-w", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN"]

    def run(*command) -> str:
        done = subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            fail(f"{command[0]} failed:\n{done.stderr[-4000:]}")
        return done.stdout

    def names(library: Path | str, which: str, *prefixes: str) -> set[str]:
        lines = run("nm", *which.split(), library).splitlines()
        return {name for line in lines if (name := line.split()[-1].split("@")[0]).startswith(prefixes)}

    with ThreadPoolExecutor(2) as pool:  # the longest first
        list(pool.map(lambda name: run(*compile, HERE / name), reversed(SOURCES)))
    # All three libraries are one, which has every name of theirs; the other two are names for it.
    wanted = names(cuda / "lib/libcudart.so.13", "-D --defined-only", "cuda", "__cuda")
    wanted |= names(nccl / "lib/libnccl.so.2", "-D --defined-only", "nccl")
    wanted |= names(torch / "lib/libcaffe2_nvrtc.so", "-D --undefined-only", "cu")  # of the driver, what torch calls
    stubs = "int simulated_missing(const char*);\n"
    for name in sorted(wanted - names("runtime.o", "--defined-only", "") - names("nccl.o", "--defined-only", "")):
        body = "0" if name in NOTHING else f'simulated_missing("{name}")'
        stubs += f"int {name}(void) {{ return {body}; }}\n"
    (folder / "stubs.c").write_text(stubs)
    (folder / "versions").write_text("libcudart.so.13 { global: *; };")
    named = "-Wl,-soname,{0} -o {0}".format
    objects = ["-x", "c", "stubs.c", "-x", "none", "runtime.o", "nccl.o", "-Wl,--version-script=versions"]
    run(*link, *objects, *named("libcudart.so.13").split())
    of_runtime = ["-L.", "-l:libcudart.so.13"]
    for name in ("libcuda.so.1", "libnccl.so.2"):
        run(*link, *named(name).split(), *of_runtime)
    libraries = [f"-l{name}" for name in ("c10", "c10_cuda", "torch_cpu", "torch_cuda")]
    run(*link, "kernels.o", "-o", "libkernels.so", *of_runtime, f"-L{torch / 'lib'}", *libraries)
