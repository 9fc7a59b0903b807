"""The policy: built, sharded, compiled, saved, merged."""

from rlcore.process import make_transformers_lean

make_transformers_lean()  # before anything here imports it
