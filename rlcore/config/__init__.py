"""Everything that defines an experiment: one frozen tree without unknown keys. Start at ``experiment.py``."""

from rlcore.config.algorithm import AlgorithmConfig as AlgorithmConfig
from rlcore.config.algorithm import KlConfig as KlConfig
from rlcore.config.base import Frozen as Frozen
from rlcore.config.build import build_experiment as build_experiment
from rlcore.config.build import read_experiment as read_experiment
from rlcore.config.build import with_new_names as with_new_names
from rlcore.config.data import CountdownConfig as CountdownConfig
from rlcore.config.data import CurriculumConfig as CurriculumConfig
from rlcore.config.data import DataConfig as DataConfig
from rlcore.config.experiment import AblationConfig as AblationConfig
from rlcore.config.experiment import Change as Change
from rlcore.config.experiment import ExperimentConfig as ExperimentConfig
from rlcore.config.experiment import changes as changes
from rlcore.config.policy import LoraConfig as LoraConfig
from rlcore.config.policy import ModelConfig as ModelConfig
from rlcore.config.policy import PartialRolloutConfig as PartialRolloutConfig
from rlcore.config.policy import RolloutConfig as RolloutConfig
from rlcore.config.policy import TinyModelConfig as TinyModelConfig
from rlcore.config.policy import TrainingConfig as TrainingConfig
from rlcore.config.reward import RewardConfig as RewardConfig
from rlcore.config.run import EvaluationConfig as EvaluationConfig
from rlcore.config.run import HealthRule as HealthRule
from rlcore.config.run import RecoveryConfig as RecoveryConfig
from rlcore.config.run import ResourceConfig as ResourceConfig
from rlcore.config.run import SegmentConfig as SegmentConfig
