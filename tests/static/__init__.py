"""The static lane: kernels compiled for GPUs that this machine lacks, their machine code read back and judged.

A test on a CPU sees a kernel's source, and a test on a GPU sees its results on the inputs that one thought of. What a
compiler did on the way (a contraction, an approximate division, a spill) shows in the machine code alone.
"""
