"""Everything that defines an experiment: one frozen tree, typos refused. Start at ``experiment.py``."""

from rlcore.config.ablation import AblationConfig
from rlcore.config.algorithm import AlgorithmConfig, KlConfig
from rlcore.config.base import Frozen
from rlcore.config.build import build_experiment
from rlcore.config.changes import Change, changes
from rlcore.config.experiment import (
    CountdownConfig,
    CurriculumConfig,
    DataConfig,
    EvaluationConfig,
    ExperimentConfig,
    LoraConfig,
    ModelConfig,
    RecoveryConfig,
    ResourceConfig,
    RolloutConfig,
    SegmentConfig,
    TinyModelConfig,
    TrainingConfig,
)
from rlcore.config.health import HealthRule
from rlcore.config.partial import PartialRolloutConfig
from rlcore.config.reward import RewardConfig

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
]
