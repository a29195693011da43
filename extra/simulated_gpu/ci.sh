#!/usr/bin/env bash
# The GPU path on simulated GPUs (README.md here), where ZERO_CUDA_PYTHON names a Python with a CUDA build.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ -z "${ZERO_CUDA_PYTHON:-}" ]; then
    echo "left out: simulated GPUs. Set ZERO_CUDA_PYTHON to a Python with extra/simulated_gpu/requirements.txt (5 GB)"
    exit
fi
chosen="test_cuda or trace or allocators or races or wait or loading or named or idle"
export PYTHON=$ZERO_CUDA_PYTHON
./launch.sh test --simulated-gpus 2 tests/test_cuda.py extra/simulated_gpu -q -k "$chosen"
# Two ranks that share a GPU over gloo, and what `./launch.sh report` runs on one GPU, with small models.
chosen="rehearsed or share and (ddp or slow)"
./launch.sh test --simulated-gpus 1 tests/test_cuda.py extra/simulated_gpu/test_simulated.py -q -k "$chosen"
