"""Preflight: each bad input is named with what was found, what is allowed and what to change."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from prefect.settings import PREFECT_API_URL, temporary_settings
from safetensors.numpy import save_file

from infra.errors import ServerError, StorageError, StorageUnusableError
from infra.settings import Settings
from infra.store.disk import usage_of
from rlcore.config import ExperimentConfig, build_experiment
from rlcore.errors import ConfigError, DataError, ModelError, RewardError, RlflowError
from rlcore.specs import BootstrapSpec
from tasks import preflight
from tasks.preflight import check


@pytest.fixture(autouse=True)
def _no_prefect_server() -> Iterator[None]:
    """Whatever server the other tests of this session use is not this one's to find."""
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        yield


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "data", server_timeout_seconds=1)


def experiment(*overrides: str) -> ExperimentConfig:
    return build_experiment({"name": "test"}, overrides)


def model_folder(folder: Path, *, template: bool = True, weights: bool = True) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    tokenizer = {"chat_template": "{{ messages }}"} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    if weights:
        header = json.dumps({"w": {"dtype": "F32", "shape": [10, 5], "data_offsets": [0, 200]}}).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(200))
    return folder


def parquet(path: Path, **columns: list[str]) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_the_default_experiment_passes(settings: Settings) -> None:
    assert check(experiment(), settings).facts["reward"] == "math, 3 made-up completions graded"


def test_a_good_folder_is_measured(settings: Settings, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    assert "0.0 M parameters" in check(experiment(f"model.path={folder}"), settings).facts["model"]


def test_an_unsupported_family_is_refused_with_what_is_supported(settings: Settings, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    (folder / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ModelError, match=r"model_type 'mamba'.* Supported are qwen2, .*own-family\.md"):
        check(experiment(f"model.path={folder}"), settings)


def test_videos_as_the_own_input_of_a_family_without_one_are_refused(settings: Settings, tmp_path: Path) -> None:
    native = "data.video_input=native"
    assert check(experiment(native, "model.tiny.family=qwen3_vl"), settings).facts["videos"] == "the model's own input"
    with pytest.raises(ModelError, match=r'glm4v is a family without .* Set data.video_input to "frames"'):
        check(experiment(native, "model.tiny.family=glm4v"), settings)
    folder = model_folder(tmp_path / "model")
    with pytest.raises(ModelError, match=r"qwen2 is a family without .* Supported are qwen2_vl, qwen2_5_vl, "):
        check(experiment(native, f"model.path={folder}"), settings)


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_pictures_that_vllm_masks_otherwise_on_a_cpu_are_refused_before_a_warm_start(
    device: str, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware, on = preflight.describe_hardware(), f"resources.device={device}"
    monkeypatch.setattr(preflight, "describe_hardware", lambda: replace(hardware, gpus=()))
    folder = model_folder(tmp_path / "model")
    (folder / "config.json").write_text('{"model_type": "gemma3", "vision_config": {}}')
    for model in ("model.tiny.family=gemma3", f"model.path={folder}"):
        with pytest.raises(ModelError, match=r"in both directions, .* Use a GPU .* model\.tiny\.family"):
            check(experiment(model, on), settings)
    (folder / "config.json").write_text('{"model_type": "internvl", "vision_config": {}}')
    for model in ("model.tiny.family=internvl", f"model.path={folder}"):
        check(experiment(model, on), settings)


def test_adapters_that_vllm_has_no_kernels_for_on_a_cpu_are_refused(settings: Settings, tmp_path: Path) -> None:
    folder, adapters = model_folder(tmp_path / "model"), "model.lora.rank=8"
    check(experiment(f"model.path={folder}", adapters, "resources.device=cpu"), settings)
    (folder / "config.json").write_text('{"model_type": "qwen3_moe"}')
    for model in ("model.tiny.family=qwen3_vl_moe", f"model.path={folder}"):
        check(experiment(model, "resources.device=cpu"), settings)
        with pytest.raises(ModelError, match=r"model has experts, .* on GPUs only\. .* set model\.lora to null"):
            check(experiment(model, adapters, "resources.device=cpu"), settings)


def test_what_vllm_computes_on_gpus_only_passes_where_there_is_one(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware = replace(preflight.describe_hardware(), gpus=("NVIDIA H100",))
    monkeypatch.setattr(preflight, "describe_hardware", lambda: hardware)
    for settings_of_run in (("model.tiny.family=gemma3",), ("model.tiny.family=qwen3_vl_moe", "model.lora.rank=8")):
        check(experiment(*settings_of_run, "resources.device=auto"), settings)


def test_a_teacher_is_checked_as_the_model_is(settings: Settings, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "teacher")
    assert "0.0 M parameters" in check(experiment(f"algorithm.teacher.path={folder}"), settings).facts["teacher"]
    assert "teacher" not in check(experiment(), settings).facts
    with pytest.raises(ModelError, match=r"algorithm\.teacher\.path is '/nowhere', and there is no folder"):
        check(experiment("algorithm.teacher.path=/nowhere"), settings)


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/model", "qwen"])
def test_missing_model_folder(settings: Settings, path: str) -> None:
    with pytest.raises(ModelError, match=r"there is no folder .* Allowed are tiny, an existing folder"):
        check(experiment(f"model.path={path}"), settings)


def test_model_without_chat_template(settings: Settings, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", template=False)
    with pytest.raises(ModelError, match=r"has no chat template \(chat_template\.jinja"):
        check(experiment(f"model.path={folder}"), settings)


def test_model_with_pickled_weights_only(settings: Settings, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", weights=False)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"no \*\.safetensors \(pytorch_model\.bin is pickled"):
        check(experiment(f"model.path={folder}"), settings)


@pytest.mark.parametrize(
    "content", [b"", struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 9) + b"{}"]
)
def test_a_broken_weights_file_is_named(content: bytes, settings: Settings, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors is no whole safetensors file .* Copy it again"):
        check(experiment(f"model.path={folder}"), settings)


def test_a_home_folder_means_the_same_to_preflight_and_to_bootstrap(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlcore.jobs.bootstrap import bootstrap

    monkeypatch.setenv("HOME", str(tmp_path))
    folder, config = model_folder(tmp_path / "model"), experiment("model.path=~/model")
    assert str(folder) in check(config, settings).facts["model"]
    spec = BootstrapSpec(result=tmp_path / "result.json", model=config.model, models_dir=settings.models_dir)
    assert bootstrap(spec).path == str(folder)


def test_dataset_without_the_columns(settings: Settings, tmp_path: Path) -> None:
    source = parquet(tmp_path / "rows.parquet", question=["1+1"], answer=["2"])
    with pytest.raises(DataError, match=r"'problem'.*[Cc]olumns found: question, answer"):
        check(experiment(f"data.train={source}"), settings)


def test_dataset_without_rows(settings: Settings, tmp_path: Path) -> None:
    source = parquet(tmp_path / "rows.parquet", problem=[], answer=[])
    with pytest.raises(DataError, match=r"has no rows.*data\.train"):
        check(experiment(f"data.train={source}"), settings)


def test_dataset_that_is_not_there(settings: Settings) -> None:
    with pytest.raises(StorageError, match=r"no file or folder at \./nowhere\.parquet"):
        check(experiment("data.train=./nowhere.parquet"), settings)


def test_unknown_reward() -> None:
    with pytest.raises(ConfigError, match=r"reward\.name: found 'maths'\. Allowed: math, .*, user, "):
        experiment("reward.name=maths")


def test_reward_that_does_not_fit_the_data(settings: Settings, tmp_path: Path) -> None:
    source = parquet(tmp_path / "rows.parquet", problem=["x?"], answer=["x+1"])
    with pytest.raises(RewardError, match=r"(?s)'gsm8k' .*failed on its dry run.*'x\+1'.*needs a number"):
        check(experiment("reward.name=gsm8k", f"data.train={source}"), settings)


def test_each_source_of_a_mixture_is_checked_with_its_own_settings(settings: Settings, tmp_path: Path) -> None:
    right = parquet(tmp_path / "right.parquet", problem=["1+1"], answer=["2"])
    other = parquet(tmp_path / "other.parquet", question=["1+1"], answer=["x+1"])
    mixture = {"right": {"source": str(right)}, "other": {"source": str(other), "reward": {"name": "gsm8k"}}}
    with pytest.raises(RlflowError) as caught:
        check(experiment(f"data.mixture={json.dumps(mixture)}"), settings)
    assert "data.mixture.other: " in str(caught.value)
    assert "Columns found: question, answer" in str(caught.value)
    assert "data.mixture.right" not in str(caught.value)
    mixture["other"] |= {"problem_column": "question", "reward": {"name": "math"}, "template": "gsm8k"}
    facts = check(experiment(f"data.mixture={json.dumps(mixture)}"), settings).facts
    assert facts["training data, other"] == f"{other}, 1 rows"
    assert facts["prompt template, other"].startswith("gsm8k, ")
    assert facts["reward, right"].startswith("math, ")
    assert "validation data" in facts  # the single one


def test_reward_of_the_users_is_tried_on_the_first_row(settings: Settings, tmp_path: Path) -> None:
    source = parquet(tmp_path / "rows.parquet", problem=["1+1"], answer=["2"], hint=["add"])
    mine = tmp_path / "mine.py"
    body = "def reward(text, problem, num_tokens, finish_reason):\n    return len(problem.extra[{!r}]) / 3"
    chosen = ("reward.name=user", f"reward.file={mine}", f"data.train={source}")
    mine.write_text(body.format("hint"))
    assert check(experiment(*chosen), settings).facts["reward"] == "user, 3 made-up completions graded"
    mine.write_text(body.format("hunt"))
    with pytest.raises(RewardError, match=r"(?s)columns \['hint'\].*KeyError: 'hunt'"):
        check(experiment(*chosen), settings)


def test_reward_of_the_users_gets_the_pictures_of_the_first_row(settings: Settings, tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.new("RGB", (1100, 40), "red").save(file, "PNG")
    pictures = [[{"bytes": file.getvalue(), "path": None}]]
    source = parquet(tmp_path / "rows.parquet", problem=["<image>?"], answer=["red"], images=pictures)
    mine = tmp_path / "mine.py"
    mine.write_text(
        "import io\nfrom PIL import Image\n"
        "def reward(text, problem, num_tokens, finish_reason):\n"
        "    (image,) = problem.images\n"
        "    picture = Image.open(io.BytesIO(image.read()))\n"
        "    assert picture.size == (image.width, image.height) == (512, 19)\n"
        "    return float(picture.getpixel((0, 0)) == (255, 0, 0))\n"
    )
    chosen = ("reward.name=user", f"reward.file={mine}", f"data.train={source}")
    assert check(experiment(*chosen), settings).facts["reward"] == "user, 3 made-up completions graded"


def test_reward_of_the_users_that_is_not_there(settings: Settings) -> None:
    with pytest.raises(RewardError, match=r"there is no file .*mine\.py"):
        check(experiment("reward.name=user", "reward.file=mine.py"), settings)


def test_unknown_template(settings: Settings) -> None:
    with pytest.raises(ConfigError, match=r"data\.template 'mathh' .* Allowed: .*math"):
        check(experiment("data.template=mathh"), settings)


def test_no_space_for_the_checkpoints(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.download, "free_bytes", lambda _: 2**20)
    with pytest.raises(StorageError, match=r"needs 0\.\d+ GiB.*has 0\.00 GiB free.*segment\.keep_checkpoints"):
        check(experiment(), settings)


# Two layers of two matrices, embedding, a norm, and a tower of one matrix: 1,600 + 800 + 10 + 300 elements.
SHAPES = {
    "model.embed_tokens.weight": (80, 10),
    "model.norm.weight": (10,),
    **{f"model.layers.{i}.mlp.up_proj.weight": (40, 10) for i in range(2)},
    **{f"model.layers.{i}.mlp.down_proj.weight": (10, 40) for i in range(2)},
    "visual.blocks.0.attn.proj.weight": (30, 10),
}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], 12 * 2710),  # weight and two moments in float32
        (["training.optimizer=adamw_bf16"], 8 * 2710),  # weight, its rounding error and two moments in bfloat16
        (["model.freeze_vision_tower=true"], 12 * 2410 + 4 * 300),
        (["model.lora.rank=4"], 12 * 4 * 4 * (40 + 10)),  # adapters alone
        (["model.lora.rank=4", "model.lora.vision_tower=true"], 12 * 4 * (4 * 50 + 40)),
    ],
)
def test_a_checkpoint_by_hand(overrides: list[str], expected: int) -> None:
    assert preflight.checkpoint_bytes(experiment(*overrides), SHAPES) == expected


def shaped_folder(folder: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    model_folder(folder, weights=False)
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def test_adapters_are_counted_as_adapters(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full checkpoint of this model has 12 MiB, its adapters of rank 1 have 24 KiB."""
    shapes = {f"model.layers.{i}.mlp.up_proj.weight": (1024, 256) for i in range(4)}
    folder = shaped_folder(tmp_path / "model", shapes)
    monkeypatch.setattr(preflight.download, "free_bytes", lambda _: preflight._FULL_DISK_RESERVE + 10 * 2**20)
    words = [f"model.path={folder}", "segment.steps=20", "training.steps=40", "segment.keep_checkpoints=1"]
    with pytest.raises(StorageError, match=r"2 checkpoints and 1 merged model needs"):
        check(experiment(*words), settings)
    fact = check(experiment(*words, "model.lora.rank=1"), settings).facts["disk"]
    assert "2 checkpoints of 0.00 GiB and 1 merged model" in fact


def test_a_champion_is_a_merged_model_more(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "deciding_benchmark", lambda name: "held-out")
    assert "and 2 merged models" in check(experiment(), settings).facts["disk"]


def test_a_quota_refuses_a_run_that_does_not_fit_and_names_clean(tmp_path: Path) -> None:
    """The tiny model needs 4 checkpoints of 12 bytes and a merged model of 4 bytes per parameter, and the reserve."""
    keep, parameters = 3, preflight.TINY_PARAMETERS
    needed = (keep + 1) * 12 * parameters + 4 * parameters + preflight._FULL_DISK_RESERVE
    words = ["training.steps=200", "segment.steps=40", f"segment.keep_checkpoints={keep}"]
    (tmp_path / "filler").write_bytes(b"x" * 2**20)
    used = usage_of(tmp_path).bytes
    enough = Settings(data_dir=tmp_path, max_gib=(needed + used + 2**20) / 2**30)
    assert "GiB needed for 4 checkpoints" in check(experiment(*words), enough).facts["disk"]
    short = Settings(data_dir=tmp_path, max_gib=(needed + used - 2**20) / 2**30)
    with pytest.raises(StorageUnusableError, match=r"RLFLOW_MAX_GIB allows .* rlflow clean shows what nobody needs"):
        check(experiment(*words), short)
    # a run that is continued has some of it already
    (tmp_path / "runs" / "old" / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "old" / "checkpoints" / "step").write_bytes(b"x" * 4 * 2**20)
    with pytest.raises(StorageUnusableError, match="RLFLOW_MAX_GIB"):
        check(experiment(*words), enough, "new")
    assert check(experiment(*words), enough, "old").facts["disk"]


def test_unreachable_mlflow(tmp_path: Path, refusing_port: int) -> None:
    settings = Settings(data_dir=tmp_path, mlflow_uri=f"http://127.0.0.1:{refusing_port}", server_timeout_seconds=1)
    with pytest.raises(ServerError, match=r"no MLflow server answers.*RLFLOW_MLFLOW_URI"):
        check(experiment(), settings)


def test_more_workers_than_gpus(settings: Settings) -> None:
    with pytest.raises(ConfigError, match=r"resources\.workers is 64 and .* on cuda, and this machine has"):
        check(
            experiment("resources.workers=64", "resources.device=cuda", "training.problems_per_batch=64"),
            settings,
        )


def test_all_findings_come_at_once(settings: Settings) -> None:
    with pytest.raises(ConfigError, match=r"(?s)2 findings:\n- model\.path.*\n- reward\.file"):
        check(experiment("model.path=./nowhere", "reward.name=user", "reward.file=mine.py"), settings)


def test_impossible_batch_arithmetic() -> None:
    with pytest.raises(ConfigError, match=r"mini_batches \(3\) does not divide .*problems_per_batch \(32\)"):
        experiment("training.mini_batches=3", "training.steps=60", "segment.steps=30")


def test_an_absent_ray_cluster_is_named(settings: Settings, refusing_port: int) -> None:
    address = f"127.0.0.1:{refusing_port}"
    with pytest.raises(ServerError, match=f"no Ray cluster listens at {address} .*RLFLOW_RAY_ADDRESS"):
        check(experiment(), settings.model_copy(update={"ray_address": address}))


def test_a_ray_client_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLFLOW_RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(ValueError, match=r"(?s)is 'ray://head:10001'.*host:port of the cluster's head.*auto"):
        Settings()
    monkeypatch.setenv("RLFLOW_RAY_ADDRESS", "head:6379")
    assert Settings().ray_address == "head:6379"
