"""verl's single-turn agent loop with the two regimes of the benchmark, and its reward.

Both are what verl's configuration lets a user replace: ``rollout.agent.agent_loop_config_path`` and
``reward.custom_reward_function``.
"""

from __future__ import annotations

import json
import os
import zlib
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

LENGTHS = "VERL_BENCH_LENGTHS"  # names the file that gets a line per rollout


class BenchAgentLoop(SingleTurnAgentLoop):
    """Samples to the cap in the first steps, with a bias on the end of the turn in those after them."""

    def __init__(self, *args: Any, fixed_steps: int, end: int, bias: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fixed_steps, self._end, self._bias = fixed_steps, end, bias

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> AgentLoopOutput:
        step = int(kwargs["global_steps"])
        regime = {"ignore_eos": True} if step <= self._fixed_steps else {"logit_bias": {self._end: self._bias}}
        output = await super().run({**sampling_params, **regime}, priority, **kwargs)
        line = json.dumps([step, len(output.prompt_ids), len(output.response_ids)]) + "\n"
        file = os.open(os.environ[LENGTHS], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(file, line.encode())
        os.close(file)
        return output


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """A checksum of the text: differs within a group, costs nothing."""
    return zlib.crc32(solution_str.encode()) % 1000 / 999
