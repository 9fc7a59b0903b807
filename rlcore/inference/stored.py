"""What a registered model needs besides its weights: how prompts are written, the limits, and where the weights are.

A folder with ``rlflow.json`` and the texts of the prompt templates. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from rlcore.artifacts import ModelRef
from rlcore.config import DataConfig, ExperimentConfig
from rlcore.data.messages import template_text
from rlcore.errors import ModelError
from rlcore.files import folder_digest, write_json_atomically

_FILE = "rlflow.json"


class StoredModel(BaseModel):
    """``rlflow.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str  # with the weights, where the model was registered
    digest: str  # of that folder
    source: str
    data: DataConfig  # templates are paths
    max_completion_tokens: int
    trust_remote_code: bool

    def weights(self, moved_to: str = "", *, verify: bool = True) -> Path:
        """The folder with the weights.

        Args:
            moved_to: where the folder is now; empty: where the model was registered.
            verify: compare its content with ``digest``, which reads all of it.

        Raises:
            ModelError: it is not there, or its content is another.
        """
        folder = Path(moved_to or self.folder)
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"the weights of this model ({self.source}) are not in {folder}: found no config.json. MLflow holds "
                f"only a reference to them. Give the folder's place now, as model_config={{'folder': '...'}} of "
                "mlflow.pyfunc.load_model, or merge the run again: rlflow merge RUN."
            )
        if verify and (actual := folder_digest(folder)) != self.digest:
            raise ModelError(
                f"{folder} has the digest {actual}, and the registered model ({self.source}) {self.digest}: its files "
                "were changed, or this is another model. Give the folder of this model, or merge the run again."
            )
        return folder


def store_settings(folder: Path, experiment: ExperimentConfig, model: ModelRef) -> StoredModel:
    """Write the settings of a model and its prompt templates to a new folder."""
    stored = StoredModel(
        folder=model.path,
        digest=model.digest,
        source=model.source,
        data=_with_templates(experiment.data, lambda name, template: _write(folder, name, template)),
        max_completion_tokens=experiment.rollout.max_completion_tokens,
        trust_remote_code=experiment.model.trust_remote_code,
    )
    write_json_atomically(folder / _FILE, stored.model_dump_json(indent=1))
    return stored


def read_settings(folder: Path) -> StoredModel:
    """What ``store_settings`` wrote, with the paths of the templates in ``folder``.

    Raises:
        ModelError: another version of rlflow wrote it, with other settings.
    """
    try:
        stored = StoredModel.model_validate_json((folder / _FILE).read_bytes())
    except (OSError, ValidationError) as error:
        raise ModelError(
            f"{folder / _FILE} cannot be read: {error}. Use the version of rlflow that registered the model, or "
            "register it again: rlflow merge RUN."
        ) from error
    data = _with_templates(stored.data, lambda _, template: str(folder / template))
    return stored.model_copy(update={"data": data})


def _with_templates(data: DataConfig, place: Callable[[str, str], str]) -> DataConfig:
    """``data`` with ``place(file name, template)`` for each template."""
    sources = {
        name: source if source.template is None else source.model_copy(update={
            "template": place(f"template-{name}.jinja", source.template)})
        for name, source in data.mixture.items()
    }  # fmt: skip
    return data.model_copy(update={"template": place("template.jinja", data.template), "mixture": sources})


def _write(folder: Path, name: str, template: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(template_text(template), encoding="utf-8")
    return name
