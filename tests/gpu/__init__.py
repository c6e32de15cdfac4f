"""The GPU lane: what only a device shows, at full size. Each test needs CUDA and says so where there is none."""
