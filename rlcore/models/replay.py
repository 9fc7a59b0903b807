"""Router replay: the layers with experts use the experts that the sampler chose. R3, arXiv:2510.11370.

Each router still computes its logits, and the weights of the chosen experts come from them, so the router trains.
Letters as in ``rlcore.batch``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlcore.families import family_of

_DIFFERING: list[Tensor] = []  # [T] bool of each router since the pass began, in the order of the layers


class RouterReplay:
    """The routers of one model."""

    def __init__(self, hf: Any) -> None:
        """Attach to the routers of a Hugging Face model. Without routes they choose as before.

        Raises:
            ValueError: the model has no experts.
        """
        family = family_of(hf.config)
        if family.experts is None:
            raise ValueError(f"{hf.config.model_type} has no experts, so there is nothing to replay")
        self._routers = family.experts.routers(family.decoder(hf))
        for router in self._routers:
            router.routes = None
            router.forward = partial(_route, router, router.forward, family.experts.weights)

    def begin(self, routes: Tensor | None) -> None:
        """Use ``routes`` [T, E, k] from now on. A negative number leaves the choice to the router. Recomputation in the
        backward pass needs them too, so they stay until the next pass begins.

        Raises:
            ValueError: the routes are not of a model with as many layers with experts.
        """
        _DIFFERING.clear()
        if routes is not None and routes.shape[1] != len(self._routers):
            raise ValueError(
                f"the routes are of {routes.shape[1]} layers, and this model has {len(self._routers)} with experts"
            )
        for layer, router in enumerate(self._routers):
            router.routes = None
            if routes is not None:
                router.routes = routes[:, layer].long()
                torch._dynamo.maybe_mark_dynamic(router.routes, 0)

    def differing(self, index: Tensor) -> Tensor:
        """[N] float32, of the tokens ``index`` in the pass that has just ended: the share of the layers whose router
        would have chosen other experts. 0 without routes."""
        if not _DIFFERING:
            return torch.zeros_like(index, dtype=torch.float32)
        return torch.stack(_DIFFERING)[:, index].float().mean(0)


def _route(router: Any, choose: Any, weigh: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The forward pass of a router: logits [T, experts], weights [T, k] and experts [T, k]."""
    logits, weights, experts = choose(hidden)
    if router.routes is None:
        return logits, weights, experts
    experts = torch.ops.rlflow.replayed(experts, router.routes)
    return logits, weigh(router, logits, experts), experts


# a custom operator: a compiled or recomputed block may not change a list
@torch.library.custom_op("rlflow::replayed", mutates_args=())
def _replayed(own: Tensor, routes: Tensor) -> Tensor:
    """[T, k] the routes, or the router's own choice where they are negative. Notes where the two differ."""
    replayed = torch.where(routes < 0, own, routes)
    _DIFFERING.append(own.sort(1).values.ne(replayed.sort(1).values).any(1))
    return replayed


@_replayed.register_fake
def _(own: Tensor, routes: Tensor) -> Tensor:
    return torch.empty_like(own)
