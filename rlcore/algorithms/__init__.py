"""Pure functions on tensors: no config object, no logging, no devices.

Inside a microbatch the N trained tokens are flat, the tokens of one sequence contiguous, and
``sequence_index [N]`` names the sequence (0..B-1) of each. A value at index t describes token t.
"""
