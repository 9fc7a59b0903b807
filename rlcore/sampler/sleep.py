"""The GPU memory of an engine, given back while the policy trains."""

from __future__ import annotations

import logging

import torch

from rlcore.sampler.engine import Engine

logger = logging.getLogger(__name__)


class EngineSleep:
    """Puts an engine to sleep as ``rollout.sleep`` says. On CPU, and with ``never``, it stays awake."""

    def __init__(self, engine: Engine) -> None:
        self._llm = engine.llm
        mode = engine.config.rollout.sleep
        self._sleeps, self._undecided = mode != "never" and engine.device != "cpu", mode == "auto"
        # a sync of all weights overwrites them anyway; one of an adapter leaves them, so they go to the host
        self._level = 2 if engine.config.model.lora is None else 1
        self._freed_bytes = 0
        self.asleep = False

    def sleep(self) -> None:
        """Give the engine's memory back until ``wake_weights`` and ``wake_cache``."""
        if self._sleeps and not self.asleep:
            free = _free_bytes()
            self._llm.sleep(level=self._level)
            self.asleep, self._freed_bytes = True, _free_bytes() - free

    def decide(self) -> None:
        """Under ``rollout.sleep: auto`` the engine stays awake from here on if it fits into memory next to training.

        Call it while the engine sleeps, after a step: torch then still holds as much as that step needed at its peak.
        """
        if not (self.asleep and self._undecided):
            return
        free, total = torch.cuda.mem_get_info()
        self._sleeps, self._undecided = free - self._freed_bytes < total / 10, False
        logger.info(
            "the sampler needs %.1f GiB and training left %.1f of %.1f GiB free: it %s while the policy trains",
            *(value / 2**30 for value in (self._freed_bytes, free, total)),
            "sleeps" if self._sleeps else "stays awake",
        )

    def wake_weights(self) -> None:
        """Take back the memory of the weights, to be loaded next."""
        if self.asleep:
            if self._sleeps:
                torch.cuda.empty_cache()  # what training took in between; else both fit
            self._llm.wake_up(tags=["weights"])

    def wake_cache(self) -> None:
        """Take back the memory of the key-value cache: the engine can sample again."""
        if self.asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self.asleep = False


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]
