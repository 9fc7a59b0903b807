"""One picklable error tree, named by the boundary that failed.

RlflowError
  ConfigError         the experiment cannot work as written; never retried
  DataError           the dataset, an image or a prompt is unusable; never retried
  ModelError          model files, tokenizer, chat template or a merge that does not verify
  RewardError         a reward function is missing or fails on its dry run
    UngradedError       too many completions of a batch could not be graded
  StorageError        files: no space, no permission, an incomplete or damaged artifact
  CheckpointError       a checkpoint does not match its manifest, or its run
  ServerError         MLflow or Prefect cannot be reached
  SamplerError        the sampler is not what the trainer says (weights, tokens, versions)
  DivergedError       non-finite gradients several steps in a row
  StarvedError        dynamic sampling found too few groups with signal
  LeaseLostError      another trainer holds the run
  TrainerFailedError  the trainer's process ended without a committed segment
    PreemptedError      it was told to stop, and has committed
    HangError           it made no progress, and was killed
    RetriesUsedUpError  one class of failure came back as often as it is retried, without progress between
  WorkerLostError     the process of a rank, or its node, is gone
  MemoryExhaustedError  memory of a GPU or of the host was not enough
  HealthError         a health rule says pause; never retried by itself
  RollbackError       a health rule says roll back; the next try starts from the last checkpoint

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


class UngradedError(RewardError):
    """Too many completions of one batch could not be graded."""


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


class PreemptedError(TrainerFailedError):
    """The trainer was told to stop, and has committed."""


class HangError(TrainerFailedError):
    """The trainer made no progress, and was killed."""


class RetriesUsedUpError(TrainerFailedError):
    """One class of failure came back as often as it is retried, without progress between."""


class WorkerLostError(RlflowError):
    """The process of a rank, or its node, is gone."""


class MemoryExhaustedError(RlflowError):
    """Memory of a GPU or of the host was not enough."""


class HealthError(RlflowError):
    """A health rule says pause."""


class RollbackError(RlflowError):
    """A health rule says roll back."""


class WorkerTraceback(Exception):
    """The traceback in the process of a rank, as the cause of the error that is raised here for it."""
