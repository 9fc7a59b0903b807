"""Everything that defines an experiment: one frozen tree without unknown keys. Start at ``experiment.py``."""

from rlcore.config.algorithm import AlgorithmConfig, KlConfig
from rlcore.config.base import Frozen
from rlcore.config.build import build_experiment, read_experiment, with_new_names
from rlcore.config.data import CountdownConfig, CurriculumConfig, DataConfig
from rlcore.config.experiment import AblationConfig, Change, ExperimentConfig, changes
from rlcore.config.policy import (
    LoraConfig,
    ModelConfig,
    PartialRolloutConfig,
    RolloutConfig,
    TinyModelConfig,
    TrainingConfig,
)
from rlcore.config.reward import RewardConfig
from rlcore.config.run import EvaluationConfig, HealthRule, RecoveryConfig, ResourceConfig, SegmentConfig

__all__ = [
    "AblationConfig",
    "AlgorithmConfig",
    "Change",
    "CountdownConfig",
    "CurriculumConfig",
    "DataConfig",
    "EvaluationConfig",
    "ExperimentConfig",
    "Frozen",
    "KlConfig",
    "HealthRule",
    "LoraConfig",
    "ModelConfig",
    "PartialRolloutConfig",
    "RecoveryConfig",
    "ResourceConfig",
    "RewardConfig",
    "RolloutConfig",
    "SegmentConfig",
    "TinyModelConfig",
    "TrainingConfig",
    "build_experiment",
    "changes",
    "read_experiment",
    "with_new_names",
]
