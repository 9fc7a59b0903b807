"""One picklable error tree, named by the boundary that failed.

RlflowError
  ConfigError         the experiment cannot work as written; never retried
  DataError           the dataset, an image or a prompt is unusable; never retried
  ModelError          model files, tokenizer, chat template or a merge that does not verify
  RewardError         a reward function is missing or fails on its dry run
  StorageError        files: no space, no permission, an incomplete or damaged artifact
  CheckpointError       a checkpoint does not match its manifest, or its run
  ServerError         MLflow or Prefect cannot be reached
  SamplerError        the sampler is not what the trainer says (weights, tokens, versions)
  DivergedError       non-finite gradients several steps in a row
  StarvedError        dynamic sampling found too few groups with signal
  LeaseLostError      another trainer holds the run
  TrainerFailedError  the trainer's process ended without a committed segment

Every message says what was found, what is allowed and what to change.
"""

from __future__ import annotations


class RlflowError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(RlflowError, ValueError):
    """The experiment cannot work as written."""


class DataError(RlflowError, ValueError):
    """A dataset, image or prompt is unusable."""


class ModelError(RlflowError):
    """Model files, tokenizer or chat template are unusable, or a merged model does not verify."""


class RewardError(RlflowError):
    """A reward function is missing, or fails on its dry run."""


class StorageError(RlflowError, OSError):
    """Files: no space, no permission, an incomplete or damaged artifact."""


class CheckpointError(StorageError):
    """A checkpoint does not match its manifest, or belongs to another run."""


class ServerError(RlflowError, ConnectionError):
    """MLflow or Prefect cannot be reached."""


class SamplerError(RlflowError):
    """The sampler does not hold what the trainer says it holds."""


class DivergedError(RlflowError):
    """Non-finite gradients several steps in a row."""


class StarvedError(RlflowError):
    """Dynamic sampling found too few groups with signal."""


class LeaseLostError(RlflowError):
    """Another trainer holds the run's lease."""


class TrainerFailedError(RlflowError):
    """The trainer's process ended without a committed segment."""
