"""The HIP text, as Python strings: one dialect (prelude), the kernels, the probes, the reference."""
