"""A mixture outside of its order: settings, datasets, cache keys, graders, validation groups and lineage."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra.settings import Settings
from rlcore.artifacts import DatasetRef, ModelRef, SourceRows
from rlcore.config import DataConfig, ExperimentConfig, build_experiment, changes
from rlcore.data.prepare.folder import dataset_key, existing_dataset, mixed_key
from rlcore.data.processor import TextProcessor
from rlcore.data.prompts import PromptBuilder
from rlcore.data.rejects import read_rejects
from rlcore.data.table import load_problems, load_rows
from rlcore.data.tiny import build_text_tokenizer
from rlcore.errors import ConfigError
from rlcore.evaluation.records import suite_digest
from rlcore.evaluation.rows import _groups
from rlcore.jobs.mix import mix
from rlcore.jobs.prepare import prepare
from rlcore.jobs.resize import resize
from rlcore.rewards.mixture import MixtureGrader
from rlcore.specs import MixSpec, PrepareSpec, ResizeSpec
from rlcore.types import Completion, Problem, Score
from tasks import data as steps
from tasks.experiments import configure, load_experiment
from tasks.lineage import Origin, _origin_rows, _source_files
from tests.quiet_grader import QuietGrader

TEXT = {"path": "tiny", "tiny": {"task": "sums"}}
MIXTURE = {
    "games": {"source": "countdown@train", "validation": "countdown@test", "reward": {"name": "countdown"}},
    "sums": {"source": "sums@train", "weight": 2.5},
}


def experiment(*overrides: str, **mixture: Any) -> ExperimentConfig:
    data = {"template": "tiny", "synthetic_problems": 16, "mixture": mixture or MIXTURE}
    return build_experiment({"name": "x", "model": TEXT, "data": data}, overrides)


def test_a_source_has_its_own_settings_and_the_others_of_a_single_source() -> None:
    layout = {"id_column": "key"}
    config = experiment(
        a={"source": "rows.jsonl", "template": "math", "answer_column": "gold", "layout": layout}, b={"source": "s@t"}
    ).data
    a, b = config.sources("train").values()
    assert (a.train, a.template, a.answer_column, a.problem_column) == ("rows.jsonl", "math", "gold", "problem")
    assert (a.layout is not None and a.layout.id_column, a.mixture) == ("key", {})
    assert (b.train, b.template, b.answer_column, b.layout) == ("s@t", "tiny", "answer", None)
    assert config.sources("validation") == {}, "data.validation stays"
    assert list(experiment().data.sources("validation")) == ["games"]
    assert DataConfig().sources("train") == {}


def test_rewards_are_those_in_use() -> None:
    assert {name: reward.name for name, reward in experiment().rewards.items()} == {"": "math", "games": "countdown"}
    own = {name: {**source, "reward": {"name": "gsm8k"}} for name, source in MIXTURE.items()}
    assert list(experiment(**own).rewards) == ["games", "sums"], "validation problems come from the sources, too"
    own["games"].pop("validation")
    assert list(experiment(**own).rewards) == ["", "games", "sums"], "data.validation is graded by reward"
    assert list(build_experiment({"name": "x"}).rewards) == [""]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.mixture.sums.weight=0"], r"data\.mixture\.sums\.weight: found 0\. Allowed: number, > 0, finite\."),
        (["data.mixture.sums.weight=-1"], r"data\.mixture\.sums\.weight: found -1"),
        (["data.mixture.sums.wieght=1"], r"data\.mixture\.sums\.wieght: unknown key\. Did you mean 'weight'"),
        (["data.mixture.other.weight=2"], r"data\.mixture\.other\.source is missing"),
        (['data.mixture={"a/b": {"source": "sums@train"}}'], r"data\.mixture has the names \['a/b'\]"),
        (
            ['data.mixture.again={"source": "sums@train", "weight": 9}'],
            r"data\.mixture\.again and data\.mixture\.sums are the same source.*sum of both weights",
        ),
        (["data.mixture.games.reward.max_ungraded_share=0.1"], r"Set reward\.max_ungraded_share instead"),
        (
            ['data.mixture.games.reward.overlong={"buffer_tokens": 4096}', "rollout.max_completion_tokens=32"],
            r"data\.mixture\.games\.reward\.overlong\.buffer_tokens \(4096\) is above",
        ),
    ],
)
def test_what_a_mixture_may_not_be(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        experiment(*overrides)


def test_a_weight_is_a_setting_with_a_key_of_its_own() -> None:
    (change,) = changes(experiment(), experiment("data.mixture.sums.weight=1"))
    assert str(change) == "data.mixture.sums.weight: was 2.5, now 1.0"
    assert change.affects_results


def test_a_single_source_that_the_mixture_replaces_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.train is given, and the experiment has data\.mixture with geometry"):
        configure("grpo-mixture-tiny", train_data="sums@train")
    with pytest.raises(ConfigError, match=r"data\.train and data\.validation is given"):
        configure("grpo-mixture-tiny", ["data.train=rows", "data.validation=rows"])
    assert configure("grpo-mixture-tiny", ["data.mixture={}", "data.train=sums@train"]).data.train == "sums@train"


def test_a_weight_changes_no_key_of_prepared_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path))

    def keys(config: ExperimentConfig) -> dict[str, str]:
        own = steps.source_experiments(config, "train")
        return {name: dataset_key(steps.prepare_spec(one, "train", Settings())) for name, one in own.items()}

    def single(source: str) -> str:
        plain = build_experiment({"name": "x", "model": TEXT, "data": {"template": "tiny", "synthetic_problems": 16}})
        (key,) = keys(plain.model_copy(update={"data": plain.data.model_copy(update={"train": source})})).values()
        return key

    first = keys(experiment())
    assert first == {"games": single("countdown@train"), "sums": single("sums@train")}, "shared with single sources"
    assert keys(experiment("data.mixture.sums.weight=7", "data.mixture.games.reward.format_score=0.5")) == first
    changed = keys(experiment("data.mixture.sums.template=gsm8k"))
    assert (changed["games"] == first["games"], changed["sums"] == first["sums"]) == (True, False)


def prepared(folder: Path, config: ExperimentConfig) -> dict[str, DatasetRef]:
    parts = {}
    for name, data in config.data.sources("train").items():
        place = {"data": data, "model": config.model, "datasets_dir": folder}
        raw = prepare(PrepareSpec(result=folder / "r", source=data.train, source_path=None, split="train", **place))
        parts[name] = resize(ResizeSpec(result=folder / "s", dataset=raw, processes=1, **place))
    return parts


def mixed(folder: Path, parts: dict[str, DatasetRef], data: DataConfig) -> MixSpec:
    return MixSpec(result=folder / "m", parts=parts, data=data, datasets_dir=folder)


def test_a_mixed_dataset_has_the_rows_of_every_source_in_turn(tmp_path: Path) -> None:
    pictures = {"source": "synthetic-geometry@train"}
    config = experiment(
        "data.synthetic_problems=5", 'model={"path": "tiny"}', big=pictures, sums={"source": "sums@validation"}
    )
    parts = prepared(tmp_path, config)
    assert [part.num_problems for part in parts.values()] == [5, 1]
    (Path(parts["sums"].path) / "rejects.jsonl").write_text(
        json.dumps({"problem_id": "bad", "row": 3, "reason": "empty_answer", "detail": "none"}) + "\n"
    )
    spec = mixed(tmp_path, parts, config.data)
    ref = mix(spec)
    assert (ref.num_problems, ref.num_images, ref.max_prompt_tokens) == (
        6,
        parts["big"].num_images,
        max(part.max_prompt_tokens for part in parts.values()),
    )
    problems = load_problems(Path(ref.path))
    assert [problem.source_name for problem in problems] == ["big", "sums", "big", "big", "big", "big"]
    of_big = [row for row in load_rows(Path(ref.path)) if row.problem.source_name == "big"]
    before = load_rows(Path(parts["big"].path))
    assert [row.problem.problem_id for row in of_big] == [f"big/{row.problem.problem_id}" for row in before]
    assert [(row.problem.source, row.row) for row in of_big] == [(row.problem.source, row.row) for row in before]
    for row, old in zip(of_big, before, strict=True):
        images = zip(row.problem.images, old.problem.images, strict=True)
        assert all(Path(new.file or "").read_bytes() == Path(was.file or "").read_bytes() for new, was in images)
    assert [(item.problem_id, item.row) for item in read_rejects(Path(ref.path) / "rejects.jsonl")] == [("sums/bad", 3)]
    assert [(part.name, part.source, part.num_problems) for part in ref.sources] == [
        ("big", "synthetic-geometry@train", 5),
        ("sums", "sums@validation", 1),
    ]
    assert mix(spec) == ref == existing_dataset(Path(ref.path))


def test_a_mixed_dataset_is_known_by_the_names_and_datasets_of_its_sources(tmp_path: Path) -> None:
    ref = DatasetRef(
        path="/a", digest="a", source="a", num_problems=1, num_rejected=0, num_images=0, max_prompt_tokens=1
    )
    other = ref.model_copy(update={"digest": "b"})
    keys = [
        mixed_key(mixed(tmp_path, parts, DataConfig()))
        for parts in ({"x": ref, "y": other}, {"y": other, "x": ref}, {"x": other, "y": ref}, {"x": ref, "z": other})
    ]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_prompts_use_the_template_of_the_source() -> None:
    prompts = PromptBuilder(TextProcessor(build_text_tokenizer()), experiment("data.mixture.sums.template=gsm8k").data)

    def text(source: str) -> str:
        return prompts.tokenizer.decode(prompts.tokens(Problem("p", "1+1=?", (), "2", "s", source_name=source)))

    assert "####" in text("sums")
    assert text("games") == text("") != text("sums")


class Named(QuietGrader):
    """Gives each completion its own reward, and answers when it is told to."""

    def __init__(self, reward: float) -> None:
        self.reward, self.futures = reward, []
        self.closed = False

    def submit(self, problems: Any, completions: Any) -> Future[list[Score]]:
        future: Future[list[Score]] = Future()
        scores = [Score(self.reward + float(p.answer), {}, graded=True) for p in problems]
        self.futures.append((future, scores))
        return future

    def answer(self) -> None:
        for future, scores in self.futures:
            future.set_result(scores)

    def last_failures(self) -> list[str]:
        return ["slow"]

    def take_metrics(self) -> dict[str, float]:
        return {"judge/calls": self.reward}

    def close(self) -> None:
        self.closed = True


def test_each_problem_is_graded_by_the_grader_of_its_source() -> None:
    plain, games = Named(10), Named(20)
    grader = MixtureGrader({"": plain, "games": games})
    problems = [
        Problem(f"p{i}", "?", (), str(i), "s", source_name=name)
        for i, name in enumerate(["sums", "games", "", "games"])
    ]
    nothing = Completion.one_turn(np.zeros(0, np.int32), np.zeros(0, np.float32), "", "stop", 0)
    future = grader.submit(problems, [nothing] * 4)
    games.answer()
    assert not future.done()
    plain.answer()
    assert [score.reward for score in future.result(timeout=1)] == [10, 21, 12, 23]
    assert grader.submit([], []).result(timeout=1) == []
    assert grader.last_failures() == ["slow", "games: slow"]
    assert grader.take_metrics() == {"judge/calls": 10, "source/games/judge/calls": 20}
    grader.close()
    assert (plain.closed, games.closed) == (True, True)


def test_the_error_of_one_grader_is_the_error_of_the_batch() -> None:
    plain, games = Named(10), Named(20)
    problems = [Problem("p", "?", (), "1", "s", source_name=name) for name in ("games", "sums")]
    nothing = Completion.one_turn(np.zeros(0, np.int32), np.zeros(0, np.float32), "", "stop", 0)
    future = MixtureGrader({"": plain, "games": games}).submit(problems, [nothing] * 2)
    games.futures[0][0].set_exception(ValueError("broken"))
    plain.answer()
    with pytest.raises(ValueError, match="broken"):
        future.result(timeout=1)


def test_sources_are_the_groups_of_an_evaluation_unless_a_column_is() -> None:
    problems = [Problem(name, "?", (), "1", "s", {"kind": "easy"}, source_name=name) for name in ("a", "b")]
    assert _groups(problems, None) == {"a": "a", "b": "b"}
    assert _groups(problems, "kind") == {"a": "easy", "b": "easy"}
    assert _groups([Problem("p", "?", (), "1", "s")], None) == {}


def test_weights_are_no_part_of_an_evaluation(tmp_path: Path) -> None:
    ref = DatasetRef(
        path="/a", digest="a", source="a", num_problems=1, num_rejected=0, num_images=0, max_prompt_tokens=1
    )
    base = ModelRef(path="/m", digest="m", source="tiny", num_parameters=1)
    first, *others = [
        suite_digest(experiment(word), ref, base)
        for word in ("seed=0", "data.mixture.sums.weight=9", "data.mixture.games.reward.format_score=0.7")
    ]
    assert (others[0] == first, others[1] == first) == (True, False)


def test_lineage_names_each_source(tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ content }}!")
    config = experiment(f"data.mixture.sums.template={template}")
    files = dict(_source_files(tmp_path / "origins", config))
    assert list(files) == ["prompt template, sums"]
    assert (tmp_path / "origins" / files["prompt template, sums"]).read_text() == "{{ content }}!"
    sources = [
        SourceRows(name=name, source=f"{name}@train", digest=digest, num_problems=rows, num_rejected=1)
        for name, digest, rows in (("games", "g" * 20, 5), ("sums", "s" * 20, 7))
    ]
    ref = DatasetRef(
        path="/a", digest="a", source="both", num_problems=12, num_rejected=2, num_images=0, max_prompt_tokens=1
    )
    origin = Origin(
        at="now", commit="c", patch=None, code_digest="d", environment="e", python="3", hardware="h", versions={},
        reward=None, template="t", train=ref.model_copy(update={"sources": tuple(sources)}), validation=ref,
        base=ModelRef(path="/m", digest="m", source="tiny", num_parameters=1), of_sources=files,
    )  # fmt: skip
    rows = dict(_origin_rows(origin, str(tmp_path)))
    assert rows["data, train, games"] == f"games@train: 5 rows, 1 rejected; digest {'g' * 16}"
    assert rows["data, train, sums"] == f"sums@train: 7 rows, 1 rejected; digest {'s' * 16}"
    assert rows["prompt template, sums"].endswith(files["prompt template, sums"])
    assert files["prompt template, sums"] in origin.files
    assert "data, validation, sums" not in rows


def test_the_recipe_is_a_mixture_of_two_with_their_own_rewards() -> None:
    config = load_experiment("grpo-mixture-tiny")
    assert {name: reward.name for name, reward in config.rewards.items()} == {"": "math", "sums": "gsm8k"}
    assert list(config.data.sources("validation")) == ["geometry", "sums"]
