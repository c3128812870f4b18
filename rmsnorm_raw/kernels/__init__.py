"""The HIP text, as Python strings: the dialect, the kernels, the probes and the reference."""
