"""The start of a process: packages that are hidden meanwhile, and the pause of the garbage collector."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.process import leaving_out, making_what_stays

LEAN = """
import sys
from rlcore.config import ModelConfig
from rlcore.data.processor import load_processor
from rlcore.process import importing_vllm

load_processor(ModelConfig(path={model!r}))
import rlcore.models.loading
with importing_vllm():
    try:
        import scipy
    except ModuleNotFoundError:
        print("no sound")
print(sorted({{"scipy", "sklearn", "torch"}} & sys.modules.keys()))
import scipy.stats, sklearn
"""
ASKED_BEFORE = """
from transformers import utils
from rlcore.process import importing_vllm

assert utils.is_sklearn_available()
with importing_vllm():
    import scipy, sklearn
"""

TRAINER = """
import sys
import rlcore.jobs.segment, rlcore.segment.batch_log, rlcore.training.assemble

print(sorted({"torch", "transformers", "sympy"} & sys.modules.keys()))
import rlcore.evaluation.validation, rlcore.segment.checkpointing, rlcore.training.loop
print("transformers" in sys.modules)
"""


def told(script: str) -> list[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split("\n")


def test_hidden_packages_are_available_again_after_the_block() -> None:
    with leaving_out("scipy.odr", "json"):
        with pytest.raises(ModuleNotFoundError):
            __import__("scipy.odr")
        assert __import__("json") is sys.modules["json"]
    assert "scipy.odr" not in sys.modules


def test_what_nobody_here_asks_for_is_not_imported(tiny_model: Path) -> None:
    assert told(LEAN.format(model=str(tiny_model))) == ["no sound", "['torch']", ""]


def test_packages_that_transformers_uses_are_not_hidden() -> None:
    assert told(ASKED_BEFORE) == [""]


def test_the_trainer_starts_ray_before_slow_imports_and_never_imports_transformers() -> None:
    assert told(TRAINER) == ["[]", "False", ""]


def test_the_collector_pauses_until_the_outermost_block_ends() -> None:
    assert gc.isenabled()
    with making_what_stays():
        with pytest.raises(ValueError, match="inside"), making_what_stays():
            raise ValueError("inside")
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with making_what_stays():
            pass
        assert not gc.isenabled(), "whoever has turned it off turns it on"
    finally:
        gc.enable()
