"""One tree of picklable errors. Every message says what was found, what is allowed and what to change."""

from __future__ import annotations


class RlflowError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(RlflowError, ValueError):
    """The experiment cannot work as written; never retried."""


class DataError(RlflowError, ValueError):
    """A dataset, image or prompt is unusable; never retried."""


class ModelError(RlflowError):
    """Model files, tokenizer or chat template are unusable, or a merged model does not verify."""


class RewardError(RlflowError):
    """A reward function is missing, or fails on its dry run."""


class UngradedError(RewardError):
    """Too many completions of one batch could not be graded."""


class JudgeAwayError(UngradedError):
    """The judge of ``reward.name: judge`` does not answer for longer than the config allows."""


class BudgetSpentError(RewardError):
    """The judge of ``reward.name: judge`` has cost what the config allows."""


class StorageError(RlflowError, OSError):
    """No space, no permission, or an incomplete or damaged artifact."""


class CheckpointError(StorageError):
    """A checkpoint does not match its manifest or its run."""


class ServerError(RlflowError, ConnectionError):
    """MLflow or Prefect cannot be reached."""


class SamplerError(RlflowError):
    """The sampler does not have the weights, tokens or version that the trainer expects."""


class DivergedError(RlflowError):
    """Non-finite gradients several steps in a row."""


class StarvedError(RlflowError):
    """Dynamic sampling found too few groups with signal."""


class LeaseLostError(RlflowError):
    """Another trainer holds the run's lease."""


class TrainerFailedError(RlflowError):
    """The trainer's process ended without a committed segment."""


class PreemptedError(TrainerFailedError):
    """The trainer stopped because it was told to."""


class HangError(TrainerFailedError):
    """The trainer made no progress and was killed."""


class RetriesUsedUpError(TrainerFailedError):
    """One class of failure used up its retries without progress in between."""


class WorkerLostError(RlflowError):
    """The process of a rank, or its node, died."""


class MemoryExhaustedError(RlflowError):
    """A GPU or the host ran out of memory."""


class HealthError(RlflowError):
    """A health rule pauses the run; never retried automatically."""


class RollbackError(RlflowError):
    """A health rule rolls the run back: the next attempt starts from the last checkpoint."""


class WorkerTraceback(Exception):
    """The traceback of an error in the process of a rank: the cause of the error raised in this process."""
