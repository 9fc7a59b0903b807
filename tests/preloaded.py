"""Imported once by the process that ``tests.ranks`` forks others from. Its environment stays as it is."""

import os
from unittest.mock import patch

from rlcore.process import importing_vllm, making_what_stays
from rlcore.sampler.start import set_engine_environment

with patch.dict(os.environ), making_what_stays():
    set_engine_environment("cpu")
    import ray

    import rlcore.models.torch_policy
    import tests.numerics.toy

    with importing_vllm():
        from vllm import LLM

__all__ = ["LLM", "ray", "rlcore", "tests"]
