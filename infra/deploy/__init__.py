"""How many nodes an experiment takes: what a file for a cluster needs to know of it. ``tasks`` fills it in."""

from __future__ import annotations

from dataclasses import dataclass

from infra.errors import DeploymentError


@dataclass(frozen=True, slots=True)
class Shape:
    name: str  # the experiment's, and that of what is made for it
    gpus: int  # of all workers together
    together: int  # workers that compute a sequence together, and so share a node
    command: tuple[str, ...]  # what the head runs

    def nodes(self, gpus_per_node: int) -> int:
        """Nodes of ``gpus_per_node`` each.

        Raises:
            DeploymentError: the workers do not fill whole nodes, or those that belong together do not fit on one.
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

    def gpus_on_each(self, gpus_per_node: int) -> int:
        return min(self.gpus, gpus_per_node)
