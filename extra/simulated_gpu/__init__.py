"""GPUs on paper: CUDA, NCCL and kernels for a machine that has no GPU, and a search for races."""
