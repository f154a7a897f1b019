"""The toy model: a small deterministic transformer in float64 that runs through a cache, and without one.

    arithmetic   weights, norms, rotary positions, attention
    stores       where a layer keeps what it remembers: plain tensors, pages of a pool, a state slot
    layers       one class for each kind of layer; ``LAYERS`` maps the kinds of a model config to them
    recurrent    the layers that keep a state
    model        ``ToyModel`` and the configs of small models
    draft        a toy model with a draft layer, whose entries depend on the next token

Read ``model`` first. This room must not know the laws or the conformance kit, and imports no other room of the testing
package.
"""

from .model import COMPOSITIONS, DELTA_RULE, ToyModel, composition, toy_config

__all__ = ["COMPOSITIONS", "DELTA_RULE", "ToyModel", "composition", "toy_config"]
