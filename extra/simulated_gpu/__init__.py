"""Simulated GPUs: CUDA, NCCL and kernels for a machine without a GPU, and a detector of races."""
