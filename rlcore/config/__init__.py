"""Everything that defines an experiment: one frozen tree, typos refused. Start at ``experiment.py``."""

from rlcore.config.ablation import AblationConfig
from rlcore.config.algorithm import AlgorithmConfig, KlConfig
from rlcore.config.base import Frozen
from rlcore.config.build import build_experiment, read_experiment, with_new_names
from rlcore.config.changes import Change, changes
from rlcore.config.data import CountdownConfig, CurriculumConfig, DataConfig
from rlcore.config.experiment import (
    EvaluationConfig,
    ExperimentConfig,
    RecoveryConfig,
    ResourceConfig,
    SegmentConfig,
)
from rlcore.config.health import HealthRule
from rlcore.config.model import LoraConfig, ModelConfig, TinyModelConfig
from rlcore.config.reward import RewardConfig
from rlcore.config.rollout import PartialRolloutConfig, RolloutConfig
from rlcore.config.training import TrainingConfig

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
