"""Pure functions on tensors: no logging, no devices.

The N trained tokens of a microbatch are flat, and the tokens of one sequence are contiguous. ``sequence_index [N]`` is
the sequence (0..B-1) of each token. A value at index t describes token t.
"""
