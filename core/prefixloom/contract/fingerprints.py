"""Fingerprints of components: what a component's records mean, from its plan, its manifest and a model's identity.

It knows no pool and no lane, only the two numbers of them that decide what the bytes of a slot are.
"""

from __future__ import annotations

from ..storage import Fingerprint
from .composition import Part
from .identity import Identity
from .manifest import Manifest


def component_fingerprint(part: Part, manifest: Manifest, entries: int, page: int, identity: Identity) -> Fingerprint:
    """The fingerprint of a component: everything beside the tokens that decides what its records mean.

    ``manifest`` and ``entries`` are those of the pool that the content lies in: states may rest in another form than
    the one in which they run. ``page``: tokens of one tree page.
    """
    component = type(part.component)
    return Fingerprint(
        model=identity.model,
        weights=identity.weights,
        adapters=identity.adapters,
        precision=identity.precision,
        positions=identity.positions,
        salt=identity.salt,
        dtype=",".join(buffer.dtype for buffer in manifest.buffers),
        page_size=part.page_tokens or page,
        plugin=f"{component.__module__}.{component.__qualname__}",
        plugin_version=str(part.manifest.version),
        layout=f"record of {', '.join(buffer.name for buffer in manifest.buffers)}",
        shapes=[
            (f"{buffer.name} of layers {','.join(map(str, buffer.layers))}", (*buffer.shape, entries))
            for buffer in manifest.buffers
        ],
        layers=sorted({layer for buffer in manifest.buffers for layer in buffer.layers}),
        shards=identity.shards if part.manifest.placement == "sharded" else {},
    )
