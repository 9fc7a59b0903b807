"""A registered model without MLflow: its settings, its prompts, its completions, the server's chat template, and its
folder in another dtype."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from rlcore.artifacts import ModelRef
from rlcore.config import DataConfig, ExperimentConfig, ModelConfig
from rlcore.data.processor import load_processor
from rlcore.data.prompts import PromptBuilder
from rlcore.errors import DataError, ModelError
from rlcore.files import folder_digest
from rlcore.inference.chat import chat_template
from rlcore.inference.pyfunc import RegisteredModel, _load_pyfunc, read_image
from rlcore.inference.stored import read_settings, store_settings
from rlcore.jobs.export import export
from rlcore.jobs.serve import command
from rlcore.specs import ExportSpec, ServeSpec
from rlcore.types import Problem
from tasks.registered import row_of

EXPERIMENT = ExperimentConfig.model_validate(
    {
        "name": "toy",
        "data": {"template": "math", "min_pixels": 784, "max_pixels": 7056, "max_prompt_tokens": 128},
        "rollout": {"max_completion_tokens": 6},
        "resources": {"device": "cpu"},
    }
)


def ref(folder: Path) -> ModelRef:
    return ModelRef(path=str(folder), digest=folder_digest(folder), source="toy", num_parameters=1)


def png(folder: Path, size: tuple[int, int] = (84, 56)) -> bytes:
    path = folder / f"{size[0]}.png"
    Image.effect_noise(size, 90).convert("RGB").save(path)
    return path.read_bytes()


@pytest.fixture
def registered(untied_model: Path, tmp_path: Path) -> RegisteredModel:
    store_settings(tmp_path / "settings", EXPERIMENT, ref(untied_model))
    return _load_pyfunc(str(tmp_path / "settings"))


def asked(model: RegisteredModel, params: dict[str, Any] | None = None, **row: object) -> tuple[str, str, int]:
    (answer,) = model.predict(pandas.DataFrame([row]), params).to_dict("records")
    return answer["completion"], answer["finish_reason"], answer["num_tokens"]


def test_a_picture_may_be_a_path_base64_or_a_data_url(registered: RegisteredModel, tmp_path: Path) -> None:
    data = png(tmp_path)
    text = base64.b64encode(data).decode()
    ways = [str(tmp_path / "84.png"), text, f"data:image/png;base64,{text}"]
    answers = {asked(registered, question="<image>Sides?", images=[way]) for way in ways}
    assert len(answers) == 1
    assert asked(registered, question="Sides?", images=ways[:1]) in answers, "without a marker pictures come first"
    assert asked(registered, question="Sides?") not in answers, "the picture reaches the model"
    with pytest.raises(DataError, match="no file here and no base64"):
        read_image("nothing.png")
    with pytest.raises(DataError, match="an image cannot be used"):
        asked(registered, question="<image>?", images=[base64.b64encode(b"no picture").decode()])


def test_the_completion_is_the_likeliest_token_each_time(
    registered: RegisteredModel, untied_model: Path, tmp_path: Path
) -> None:
    """The oracle has no cache: after each token, transformers reads the whole sequence again."""
    data = png(tmp_path)
    processor = load_processor(ModelConfig(path=str(untied_model)))
    prompts = PromptBuilder(processor, EXPERIMENT.data)
    model = AutoModelForImageTextToText.from_pretrained(untied_model, dtype=torch.float32)
    text = prompts.chat_text("<image>Sides?", 1)
    opened = Image.open(tmp_path / "84.png").convert("RGB").resize(prompts.target_size(84, 56), 3)
    size = {"shortest_edge": 784, "longest_edge": 7056}
    written: list[int] = []
    for _ in range(EXPERIMENT.rollout.max_completion_tokens):
        inputs = processor(text=[text], images=[opened], return_tensors="pt", images_kwargs={"size": size})
        ids = torch.cat([inputs["input_ids"], torch.tensor([written], dtype=torch.long)], 1)
        kinds = torch.zeros_like(ids)
        kinds[ids == prompts.placeholders.image_token_id] = 1
        pictures = {name: inputs[name] for name in ("pixel_values", "image_grid_thw")}
        with torch.no_grad():
            logits = model(input_ids=ids, mm_token_type_ids=kinds, use_cache=False, **pictures).logits[0, -1]
        logits[list(prompts.banned_token_ids)] = -torch.inf
        written.append(int(logits.argmax()))
        if written[-1] == processor.tokenizer.eos_token_id:
            break
    completion, reason, count = asked(registered, question="<image>Sides?", images=[base64.b64encode(data).decode()])
    assert completion == processor.tokenizer.decode(written, skip_special_tokens=True)
    assert (reason, count) == ("stop" if written[-1] == processor.tokenizer.eos_token_id else "length", len(written))


def test_a_row_s_own_arguments_of_the_chat_template_reach_the_prompt(untied_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(untied_model, model)
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text(template + "{{ effort }}")
    store_settings(tmp_path / "settings", EXPERIMENT, ref(model))
    loaded = _load_pyfunc(str(tmp_path / "settings"))
    effort = "Count twice."
    problem = Problem("p", "Sides?", (), "5", "toy", chat_template_arguments={"effort": effort})
    row = row_of(problem)
    assert row["chat_template_arguments"] == json.dumps({"effort": effort})
    assert asked(loaded, **row) == asked(
        loaded, question="Sides?", chat_template_arguments=json.dumps({"effort": effort})
    )
    assert asked(loaded, **row)[0] != asked(loaded, question="Sides?")[0]
    with pytest.raises(DataError, match=r"chat_template_arguments is 'effort'\. Give a mapping as JSON"):
        asked(loaded, question="Sides?", chat_template_arguments="effort")


def test_the_limit_and_the_seed_are_the_callers(registered: RegisteredModel) -> None:
    assert asked(registered, {"max_completion_tokens": 2}, question="Sides?")[2] <= 2
    hot = {"temperature": 5.0, "top_p": 1.0}
    first = asked(registered, {**hot, "seed": 1}, question="Sides?")
    assert asked(registered, {**hot, "seed": 1}, question="Sides?") == first
    assert {asked(registered, {**hot, "seed": seed}, question="Sides?") for seed in range(2, 6)} != {first}
    with pytest.raises(DataError, match=r"training used at most 128 \(data\.max_prompt_tokens\)"):
        asked(registered, question="Sides? " * 100)


def test_weights_that_were_moved_are_named_and_others_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    shutil.copytree(tiny_model, here)
    store_settings(tmp_path / "settings", EXPERIMENT, ref(here))
    moved = here.rename(tmp_path / "moved")
    with pytest.raises(ModelError, match=r"are not in .*/here: found no config\.json.*model_config=.*rlflow merge RUN"):
        _load_pyfunc(str(tmp_path / "settings"))
    assert isinstance(_load_pyfunc(str(tmp_path / "settings"), {"folder": str(moved)}), RegisteredModel)
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(config | {"note": "changed"}))
    with pytest.raises(ModelError, match="its files were changed, or this is another model"):
        _load_pyfunc(str(tmp_path / "settings"), {"folder": str(moved)})
    _load_pyfunc(str(tmp_path / "settings"), {"folder": str(moved), "verify": False})
    with pytest.raises(ModelError, match="dtype is 'bfloat'. Allowed: auto, float32"):
        _load_pyfunc(str(tmp_path / "settings"), {"folder": str(moved), "verify": False, "dtype": "bfloat"})


def test_a_users_template_is_stored_with_the_model(tiny_model: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("Q: {{ content }}\n")
    data = EXPERIMENT.data.model_copy(update={"template": str(own), "system_prompt": "Be brief."})
    store_settings(tmp_path / "settings", EXPERIMENT.model_copy(update={"data": data}), ref(tiny_model))
    processor = load_processor(ModelConfig(path=str(tiny_model)))
    expected = PromptBuilder(processor, data).chat_text("Sides?", 0)
    own.unlink()
    assert PromptBuilder(processor, read_settings(tmp_path / "settings").data).chat_text("Sides?", 0) == expected
    (tmp_path / "settings" / "rlflow.json").write_text("{}")
    with pytest.raises(ModelError, match="Use the version of rlflow that registered the model"):
        read_settings(tmp_path / "settings")


@pytest.mark.parametrize("template", ["math", "dapo", "tiny", "countdown"])
@pytest.mark.parametrize("system", [None, "", 'Say "yes" or\n"no", \\o/.'])
def test_a_servers_chat_template_writes_the_prompts_of_training(
    tiny_model: Path, template: str, system: str | None
) -> None:
    processor = load_processor(ModelConfig(path=str(tiny_model)))
    data = DataConfig(template=template, system_prompt=system)
    made, prompts = chat_template(processor, data), PromptBuilder(processor, data)

    def rendered(*messages: tuple[str, Any]) -> str:
        conversation = [{"role": role, "content": content} for role, content in messages]
        text = processor.apply_chat_template(
            conversation, chat_template=made, tokenize=False, add_generation_prompt=True
        )
        return str(text)

    picture, text = {"type": "image"}, lambda words: {"type": "text", "text": words}
    asks = 'X?\nPut it: answer on its own line after "Answer:".'
    assert rendered(("user", [picture, text("Left"), picture, text(" or right? ")])) == prompts.chat_text(
        "<image>Left<image> or right? ", 2
    )
    assert rendered(("user", asks)) == rendered(("user", [text(asks)])) == prompts.chat_text(asks, 0)
    earlier = rendered(("user", "Before."), ("assistant", "Yes."), ("user", "After."))
    assert "Before.<" in earlier, "the template is around the last question alone"


def test_a_template_that_chat_templates_cannot_hold_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("{% if content %}\nQ: {{ content }}{% endif %}")  # chat templates drop this line's end
    processor = load_processor(ModelConfig(path=str(tiny_model)))
    with pytest.raises(ModelError, match="cannot write the prompts of training.*--plain"):
        chat_template(processor, DataConfig(template=str(own)))


def test_a_server_has_the_limits_of_its_run(tiny_model: Path, tmp_path: Path) -> None:
    data = EXPERIMENT.data.model_copy(update={"max_images": 3})
    spec = ServeSpec(
        result=tmp_path / "result.json", experiment=EXPERIMENT.model_copy(update={"data": data}), model=str(tiny_model),
        name="geo", host="127.0.0.1", port=8123, gpu_memory_utilization=0.9, words=("--max-num-seqs", "4"),
    )  # fmt: skip
    words = command(spec, "cpu")
    assert words[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    given = dict(zip(words[3::2], words[4::2], strict=False))
    expected = {
        "--model": str(tiny_model), "--served-model-name": "geo", "--host": "127.0.0.1", "--port": "8123",
        "--max-model-len": "134", "--dtype": "float32", "--generation-config": "vllm",
        "--chat-template": str(tmp_path / "chat_template.jinja"),
    }  # fmt: skip
    assert expected.items() <= given.items()
    assert json.loads(given["--override-generation-config"]) == {"max_new_tokens": 6}
    assert json.loads(given["--limit-mm-per-prompt"]) == {"image": 3, "video": 0}
    assert json.loads(given["--mm-processor-kwargs"]) == {"size": {"shortest_edge": 784, "longest_edge": 7056}}
    assert words[-2:] == ["--max-num-seqs", "4"], "the caller's words come last, and count"
    assert "Think first" in (tmp_path / "chat_template.jinja").read_text()
    assert "--chat-template" not in command(spec.model_copy(update={"plain": True}), "cpu")
    on_gpu = command(spec, "cuda")
    assert on_gpu[on_gpu.index("--dtype") + 1] == "bfloat16"
    assert on_gpu[on_gpu.index("--gpu-memory-utilization") + 1] == "0.9"


def test_an_exported_model_is_the_merged_one_rounded(tiny_model: Path, tmp_path: Path) -> None:
    spec = ExportSpec(result=tmp_path / "result.json", model=ref(tiny_model), out=tmp_path / "out")
    made = export(spec)
    assert made.digest == folder_digest(tmp_path / "out")
    before, after = load_file(tiny_model / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(value.dtype == torch.bfloat16 for value in after.values())
    assert all(torch.equal(before[name].bfloat16(), value) for name, value in after.items())
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in tiny_model.iterdir()}
    assert AutoModelForImageTextToText.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
