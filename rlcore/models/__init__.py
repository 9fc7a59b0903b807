"""The policy: built, sharded, compiled, saved, merged."""

from rlcore.startup import make_transformers_lean

make_transformers_lean()  # before anything here imports it
