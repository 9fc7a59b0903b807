"""The reward of a Hugging Face reward model: a tiny one with random weights, in a process of its own."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlcore.config import build_experiment
from rlcore.config.experiment import changes
from rlcore.config.reward import ModelReward, ScoringModelConfig, own_digest
from rlcore.errors import LeaseLostError, RewardError, WorkerLostError
from rlcore.models.scoring import device_of, load
from rlcore.rewards.dry_run import dry_run
from rlcore.rewards.model_grader import ModelGrader, mapped
from rlcore.rewards.scoring import Chat, chat_of, weight_bytes
from rlcore.rewards.thoughts import ThoughtRule
from rlcore.types import Completion, Message, Problem, Score
from tasks.cli.estimate import _reward_model_bytes
from tests.reward_models import tiny_reward_model

PROBLEM = Problem("p1", "<image>2 + 3 = ?", (), "5", "test", context=(Message("system", "Be brief."),))
TEXTS = ["5", "The answer is five.", "", "\\boxed{5} " * 9, "<think>hm</think>\\boxed{5}", "no idea, sorry"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_reward_model(tmp_path_factory.mktemp("reward") / "model")


def config(model: Path, **settings: Any) -> ScoringModelConfig:
    return ScoringModelConfig.model_validate({"path": str(model), "batch_size": 4, **settings})


def completion(text: str) -> Completion:
    return Completion.one_turn(np.zeros(4, np.int32), np.zeros(4, np.float32), text, "stop", 0)


class InThisProcess:
    """The same model without a process of its own, whose start takes seconds."""

    def __init__(self, config: ScoringModelConfig, first_free_gpu: int | None) -> None:
        self.scorer = load({**config.model_dump(mode="json"), "first_free_gpu": first_free_gpu})
        self.device = str(self.scorer.model.device)

    def score(self, chats: list[Chat]) -> list[float | str]:
        return self.scorer.score(chats)

    def close(self) -> None:
        return


def quick(settings: ScoringModelConfig, folder: Path, **more: Any) -> ModelGrader:
    return ModelGrader(settings, folder, start=InThisProcess, **more)


def grade(grader: ModelGrader, *texts: str) -> list[Score]:
    return grader.submit([PROBLEM] * len(texts), [completion(text) for text in texts]).result(120)


def one_by_one(model: Path, texts: list[str]) -> list[float]:
    """What transformers computes for each text alone, from the same chat."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    scorer = AutoModelForSequenceClassification.from_pretrained(model).eval()
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "[picture 1]2 + 3 = ?"}]
    scores = []
    for text in texts:
        chat = tokenizer.apply_chat_template([*asked, {"role": "assistant", "content": text}], tokenize=False)
        with torch.inference_mode():
            scores.append(float(scorer(**tokenizer(chat, return_tensors="pt", add_special_tokens=False)).logits))
    return scores


def test_scores_are_those_of_transformers_whatever_the_batch(model: Path, tmp_path: Path) -> None:
    expected = one_by_one(model, TEXTS)
    assert max(expected) - min(expected) > 1e-3  # so the test can fail
    for size in (1, 4):
        with quick(config(model, batch_size=size), tmp_path / str(size)) as grader:
            scores = grade(grader, *TEXTS)
            assert [score.reward for score in scores] == pytest.approx(expected, abs=1e-5)
            assert [score.parts["raw_score"] for score in scores] == [score.reward for score in scores]
            assert [score.parts["accuracy"] for score in scores] == [min(1, max(0, s.reward)) for s in scores]
            metrics = grader.take_metrics()
            assert (metrics["reward_model/scored"], metrics["reward_model/replayed"]) == (len(TEXTS), 0)
            assert grade(grader, *reversed(TEXTS)) == scores[::-1]
            assert grader.take_metrics()["reward_model/replayed"] == len(TEXTS)


def test_a_score_is_kept_by_the_journal_and_mapped_as_configured(model: Path, tmp_path: Path) -> None:
    with quick(config(model), tmp_path) as grader:
        raw = [score.reward for score in grade(grader, *TEXTS)]
    settings = config(model, mean=0.5, std=2.0, scale="sigmoid", format_weight=0.25, batch_size=1)
    with quick(settings, tmp_path) as grader:
        scores = grade(grader, *TEXTS)
        assert grader.take_metrics()["reward_model/scored"] == 0
    for value, text, score in zip(raw, TEXTS, scores, strict=True):
        part = 1 / (1 + math.exp(-(value - 0.5) / 2))
        well_formed = float(text == TEXTS[4])
        assert score.reward == pytest.approx(0.75 * part + 0.25 * well_formed)
        assert score.parts == {"accuracy": pytest.approx(part), "raw_score": value, "format": well_formed}


def test_the_scale_by_hand(tmp_path: Path) -> None:
    assert mapped(3.0, config(tmp_path, mean=1.0, std=4.0)) == 0.5
    assert mapped(0.0, config(tmp_path, scale="sigmoid")) == 0.5
    assert mapped(math.log(3), config(tmp_path, scale="sigmoid")) == pytest.approx(0.75)
    assert mapped(-1e4, config(tmp_path, scale="sigmoid")) == 0.0


def test_pictures_are_named_and_only_the_text_after_the_thought_is_scored(model: Path, tmp_path: Path) -> None:
    chat = chat_of(PROBLEM, "<image>5")
    assert [turn["content"] for turn in chat] == ["Be brief.", "[picture 1]2 + 3 = ?", "<image>5"]
    rule = ThoughtRule(opened=False, grades_format=False)
    with quick(config(model), tmp_path, thoughts=rule) as grader:
        thought, plain = grade(grader, "<think>hm</think>five", "five")
        assert grader.take_metrics()["reward_model/scored"] == 1  # one text
    assert (thought.reward, thought.parts["unclosed_thought"]) == (plain.reward, 0.0)


def test_a_conversation_that_is_too_long_is_ungraded_for_good(model: Path, tmp_path: Path) -> None:
    for _ in range(2):
        with quick(config(model, max_tokens=60), tmp_path) as grader:
            scores = grade(grader, "5", "word " * 200)
            assert [score.graded for score in scores] == [True, False]
            assert "reward.model.max_tokens allows 60" in grader.last_failures()[0]


def test_a_process_that_dies_ends_the_run_for_another_try(model: Path, tmp_path: Path) -> None:
    """The process scores as the model does in this one, and what it has scored stays in the journal."""
    with ModelGrader(config(model), tmp_path) as grader:
        first = grade(grader, *TEXTS)
        assert [score.reward for score in first] == pytest.approx(one_by_one(model, TEXTS), abs=1e-5)
        os.kill(grader._process._process.pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError, match="process of the reward model ended with -9"):
            grade(grader, "another")
    with quick(config(model), tmp_path) as grader:
        assert grade(grader, *TEXTS) == first


def test_a_trainer_that_lost_its_run_stops_and_closing_fails_the_rest(model: Path, tmp_path: Path) -> None:
    def lost() -> None:
        raise LeaseLostError("another trainer")

    with quick(config(model), tmp_path, on_progress=lost) as grader, pytest.raises(LeaseLostError):
        grade(grader, "five")
    with pytest.raises(RewardError, match="is closed"):
        grade(grader, "five")


# before training


def _without(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink(missing_ok=True) for name in names] and None


def _with(**settings: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tree = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(tree | settings))

    return change


def _no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "chat_template"}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shutil.rmtree, "is no folder with a config.json"),
        (_without("config.json"), "is no folder with a config.json"),
        (_with(architectures=["Qwen2ForCausalLM"]), "holds Qwen2ForCausalLM, and a reward model must be a"),
        (_with(id2label={"0": "bad", "1": "good"}), "has 2 labels, and a reward model has one"),
        (_no_template, "has a tokenizer without a chat template"),
    ],
)
def test_a_folder_that_cannot_work_is_refused_before_training(
    model: Path, tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    reward = ModelReward(model=config(copy))
    assert dry_run(reward, max_completion_tokens=8) == ()
    change(copy)
    with pytest.raises(RewardError, match=message):
        dry_run(reward, max_completion_tokens=8)
    with pytest.raises(RewardError, match=message):
        ModelGrader(config(copy), tmp_path / "scores")


def test_weights_that_cannot_be_loaded_are_refused(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    (copy / "model.safetensors").write_bytes(b"")
    with pytest.raises(RewardError, match="the reward model fails: "):
        ModelGrader(config(copy), tmp_path / "scores")


def test_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [device_of("auto", free) for free in (None, 0, 1, 2)] == ["cpu", "cuda:0", "cuda:1", "cpu"]
    assert (device_of("cpu", 0), device_of("cuda:1", None)) == ("cpu", "cuda:1")
    with pytest.raises(ValueError, match="is cuda:2, and 2 GPUs are visible"):
        device_of("cuda:2", 0)


def test_the_estimate_counts_the_weights_on_a_gpu_of_the_policy(model: Path) -> None:
    from safetensors.torch import load_file

    elements = sum(tensor.numel() for tensor in load_file(model / "model.safetensors").values())
    assert (weight_bytes(model, "float32"), weight_bytes(model, "bfloat16")) == (4 * elements, 2 * elements)

    def counted(device: str) -> int:
        settings = ["reward.name=model", f"reward.model.path={model}", f"reward.model.device={device}"]
        return _reward_model_bytes(build_experiment({"name": "m"}, [*settings, "resources.workers=2"]))

    assert [counted(device) for device in ("cuda:0", "cuda:1", "cuda:2", "cpu", "auto")] == [4 * elements] * 2 + [0] * 3


def test_other_weights_are_another_reward(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    reward = ModelReward(model=config(copy))
    before = own_digest(reward)
    assert before == own_digest(ModelReward(model=config(model)))
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0?")
    assert own_digest(reward) != before


def test_where_the_model_runs_may_change_in_a_run(model: Path) -> None:
    def experiment(*settings: str) -> Any:
        return build_experiment({"name": "m"}, ["reward.name=model", f"reward.model.path={model}", *settings])

    base = experiment()
    moved = experiment("reward.model.device=cuda:1", "reward.model.batch_size=2")
    assert moved.results_digest() == base.results_digest()
    for setting in ("scale=sigmoid", "mean=1", "std=2", "format_weight=0.5", "dtype=bfloat16", "max_tokens=9"):
        (change,) = changes(base, experiment(f"reward.model.{setting}"))
        assert change.affects_results
