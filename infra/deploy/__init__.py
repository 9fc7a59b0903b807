"""How many nodes an experiment needs, for the deployment files of clusters. ``tasks`` makes the ``Shape``."""

from __future__ import annotations

from dataclasses import dataclass

from infra.errors import DeploymentError


@dataclass(frozen=True, slots=True)
class Shape:
    name: str  # of the experiment and of the cluster objects made for it
    gpus: int  # of all workers together
    together: int  # workers that compute one sequence together and must share a node
    command: tuple[str, ...]  # runs on the head node

    def nodes(self, gpus_per_node: int) -> int:
        """Nodes of ``gpus_per_node`` each.

        Raises:
            DeploymentError: the workers do not fill whole nodes, or a sequence's workers do not fit on one node.
        """
        if gpus_per_node % self.together and self.gpus > self.together:
            raise DeploymentError(
                f"training.sequence_parallel is {self.together}, and a node has {gpus_per_node} GPUs: workers that "
                f"compute a sequence together share a node. Set it to a divisor of {gpus_per_node}."
            )
        if self.gpus > gpus_per_node and self.gpus % gpus_per_node:
            raise DeploymentError(
                f"{self.name} takes {self.gpus} GPUs, and nodes of {gpus_per_node} leave a part of one unused. Set "
                f"resources.workers and resources.rollout_workers to a multiple of {gpus_per_node} together, or "
                "gpus_per_node to what your nodes have."
            )
        return max(1, self.gpus // gpus_per_node)
