"""Images in a prompt: what tells them apart in the cache, and what the model is given of them in each pass.

transformers encodes images into features, and puts these, row by row, in the places of one token id. So what layers
remember from there on depends on the pixels, and the tokens alone do not tell. Here each image's places get a digest of
the image as an extra key. Images are encoded in the first pass that computes one of their tokens, so that an image that
hits is never encoded.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from prefixloom import InputError

from ..contract.model import Media, Span
from ..contract.requests import shown
from ..contract.weights import digest_of
from .rows import Rows

Tensors = Mapping[str, Tensor]


@attrs.frozen
class Image:
    """``tokens``: in how many places of a prompt its features stand. ``tensors``: what the encoder is given of it."""

    tokens: int
    tensors: Tensors


Split = Callable[[Any, Tensors, int], list[Image]]
"""Takes a config, the tensors of all images, and the number of places; returns the images in their order."""


def by_index(config: Any, given: Tensors, places: int) -> list[Image]:
    """Split images of one shape, and so of equally many tokens, at the indices of the first dimension."""
    count = _equally_many(given)
    if not count or not places or places % count:
        raise InputError(f"{count} images cannot share {places} places of image tokens equally")
    return [Image(places // count, {name: each[at : at + 1] for name, each in given.items()}) for at in range(count)]


def by_tile(config: Any, given: Tensors, places: int) -> list[Image]:
    """Split the tiles of one conversation's images, which lie along the second dimension."""
    if any(each.shape[0] != 1 for each in given.values()):
        raise InputError(f"a prompt has the images of one conversation, got those of {_equally_many(given)}")
    pixels, mask = given["pixel_values"], given["pixel_attention_mask"]
    if mask.shape[2:] != pixels.shape[3:]:
        raise InputError(
            f"pixel_attention_mask is of {tuple(mask.shape[2:])}, and the tiles of {tuple(pixels.shape[3:])}"
        )
    if not (pixels != 0).flatten(2).any(-1).all():
        raise InputError("a tile of the images is all zeros, which the model takes for padding: leave padding out")
    tiles = by_index(config, {name: each[0] for name, each in given.items()}, places)
    return [attrs.evolve(tile, tensors={name: each[None] for name, each in tile.tensors.items()}) for tile in tiles]


def by_grid(config: Any, given: Tensors, places: int) -> list[Image]:
    """Split images whose patches lie end to end, so many as ``image_grid_thw`` says; some patches share a token."""
    patches, grids = given["pixel_values"], given["image_grid_thw"]
    side = config.vision_config.spatial_merge_size
    whole = not grids.is_floating_point() and grids.shape[1] == 3
    if not whole or (grids < 1).any() or (grids[:, 1:] % side).any():
        raise InputError(
            f"image_grid_thw has a time, a height and a width for each image, whole numbers from 1 up, the latter two "
            f"multiples of {side}, got {grids.tolist()}"
        )
    counts = grids.prod(-1).tolist()
    if sum(counts) != len(patches) or not counts:
        raise InputError(f"image_grid_thw tells of {sum(counts)} patches, and pixel_values has {len(patches)}")
    shared = side**2
    parts = torch.split(patches, counts)
    return [
        Image(count // shared, {"pixel_values": part, "image_grid_thw": grids[at : at + 1]})
        for at, (count, part) in enumerate(zip(counts, parts, strict=True))
    ]


def by_size(config: Any, given: Tensors, places: int) -> list[Image]:
    """Split images of sizes of their own, padded to the largest."""
    return _sized(given, "image_sizes", config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1))


def by_shape(config: Any, given: Tensors, places: int) -> list[Image]:
    """Split images given as patches, with the height and width of each in patches; some patches share a token."""
    return _sized(given, "spatial_shapes", config.downsample_factor)


def _sized(given: Tensors, name: str, step: int) -> list[Image]:
    """Split images whose heights and widths the tensor of this name has; a token for each square of ``step``."""
    sizes = given[name]
    if not _equally_many(given) or sizes.min() < 1:
        raise InputError(f"{name} are the heights and widths of at least one image, got {sizes.tolist()}")
    return [
        Image(int((size // step).prod()), {each: tensor[at : at + 1] for each, tensor in given.items()})
        for at, size in enumerate(sizes)
    ]


def _equally_many(given: Tensors) -> int:
    """Return the length of the first dimension, which all these tensors have to share."""
    counts = {len(each) for each in given.values()}
    if len(counts) != 1:
        raise InputError(f"{' and '.join(given)} are of different numbers of images: {sorted(counts)}")
    return counts.pop()


@attrs.frozen
class Family:
    """How the models of a type take images.

    ``split``      tells the images of a prompt apart
    ``names``      the tensors of images, and how many dimensions each has
    ``along``      the dimension of these along which images lie side by side
    ``types``      the input that marks the tokens of images; "": none
    ``both_ways``  whether marked tokens that stand together see each other
    """

    split: Split
    names: Mapping[str, int] = attrs.field(factory=lambda: {"pixel_values": 4})
    along: int = 0
    types: str = ""
    both_ways: bool = False


NONE = Family(by_index, names={})
PLAIN = Family(by_index)
TILES = Family(by_tile, {"pixel_values": 5, "pixel_attention_mask": 4}, along=1)
GRID = Family(by_grid, {"pixel_values": 2, "image_grid_thw": 2}, types="mm_token_type_ids")
SIZED = Family(by_size, {"pixel_values": 4, "image_sizes": 2})
SHAPED = Family(by_shape, {"pixel_values": 3, "spatial_shapes": 2, "pixel_attention_mask": 2})
TOKEN_TYPES = "token_type_ids"
MARKS = (TOKEN_TYPES, "mm_token_type_ids")
"""The inputs that may mark tokens of images."""
FAMILIES = {
    "aya_vision": PLAIN,
    "cohere2_vision": PLAIN,
    "gemma3": Family(by_index, types=TOKEN_TYPES, both_ways=True),
    "glm4v": GRID,
    "idefics3": TILES,
    "internvl": PLAIN,
    "lfm2_vl": SHAPED,
    "llava": PLAIN,
    "mistral3": SIZED,
    "qwen2_5_vl": GRID,
    "qwen2_vl": GRID,
    "qwen3_5": GRID,
    "qwen3_5_moe": GRID,
    "qwen3_vl": GRID,
    "qwen3_vl_moe": GRID,
    "smolvlm": TILES,
}
"""By model type. Each was compared with runs without a cache (engine/tests/hf/test_hf_images.py)."""


@attrs.frozen
class Encoded:
    """What the encoder made of the images from the one with number ``first`` on."""

    first: int
    output: Any


@attrs.define(eq=False)
class PromptImages(Media):
    """The images of one prompt.

    ``count``   how many tokens the prompt has
    ``images``  in the order of their places
    ``at``      the places: the positions of image tokens
    ``rotary``  (3, count): the positions that rotary embeddings use; None: the plain ones
    """

    count: int = 0
    family: Family = NONE
    images: Sequence[Image] = ()
    at: Sequence[int] = ()
    rotary: Tensor | None = None
    _encoded: Encoded | None = attrs.field(default=None, init=False)

    def places_in(self, start: int, end: int) -> range:
        """Return the numbers of the places that lie in [start, end)."""
        return range(bisect_left(self.at, start), bisect_left(self.at, end))

    def pass_end(self, start: int, end: int) -> int:
        """Return where a pass may end: if it begins before an image of the prompt, not beyond the prompt.

        There, an image token stands for itself: it was answered and has no image.
        """
        if start < self.count < end and self.places_in(start, self.count):
            end = self.count
        return super().pass_end(start, end)

    def inputs(self, model: Any, start: int, end: int) -> dict[str, Any]:
        """Return the model's inputs of the images in a pass over [start, end). Encode images that are not encoded."""
        places = self.places_in(start, end)
        if not places:
            return {}
        found: dict[str, Any] = {"mm_encoder_outputs": {"image": self._features(model, places)}}
        if self.family.both_ways:  # the mask is made of the marks, by position
            found[self.family.types] = self.marks(0, end).to(model.device)[None]
        return found

    def marks(self, start: int, end: int) -> Tensor:
        """Return 1 for each token of an image and 0 for the others, (end - start)."""
        marks = torch.zeros(end, dtype=torch.int64)
        marks[list(self.at[: self.places_in(0, end).stop])] = 1
        return marks[start:]

    def positions(self, start: int, end: int) -> Tensor:
        """Return the positions that rotary embeddings use, also behind the prompt: (3, end - start)."""
        assert self.rotary is not None
        known = self.rotary[:, start:end]
        behind = torch.arange(max(start, self.count), max(end, self.count)) + int(self.rotary.max()) + 1 - self.count
        return torch.cat([known, behind.expand(3, -1)], dim=1)

    def without_own(self, model: Any, given: Mapping[str, Any], start: int, end: int) -> dict[str, Any]:
        """Leave out what a caller gives of images in a pass over [start, end), after a look whether it is the same."""
        left = dict(given)
        if not self.images:
            return left
        outputs = left.pop("mm_encoder_outputs", None) or {}
        marks = left.pop(self.family.types, None)
        same = self._are_features(model, outputs) and (marks is None or self._are_marks(marks, start, end))
        for name in self.family.names:
            value = left.pop(name, None)
            if value is not None:
                same &= torch.equal(torch.as_tensor(value).cpu(), self._together(name, self.images))
        if not same:
            raise InputError("the model was given other images than its session was opened with")
        return left

    def _are_features(self, model: Any, outputs: Mapping[str, Any]) -> bool:
        image = outputs.get("image")
        if image is None:
            return outputs.keys() <= {"image"}
        own = self._encode(model, 0)
        return len(outputs) == 1 and torch.equal(_flat(image["pooler_output"]), _flat(own["pooler_output"]))

    def _are_marks(self, given: Tensor, start: int, end: int) -> bool:
        """Return whether these are the marks of [start, end). Marks shorter than the pass are of tokens before it."""
        if given.shape[-1] < end - start:
            return True
        return torch.equal(given.cpu().flatten()[start - end :].long(), self.marks(start, end))

    def _features(self, model: Any, places: range) -> Any:
        ends = list(itertools.accumulate(image.tokens for image in self.images))
        first = next(at for at, end in enumerate(ends) if places.start < end)
        if self._encoded is None or self._encoded.first > first:
            self._encoded = Encoded(first, self._encode(model, first))
        known = self._encoded
        before = ends[known.first] - self.images[known.first].tokens
        return rows_of(known.output, range(places.start - before, places.stop - before), len(self.at) - before)

    def _encode(self, model: Any, first: int) -> Any:
        """Encode the images from the one with number ``first`` on, in one call, as ``generate`` does."""
        images = self.images[first:]
        tensors = {name: self._together(name, images).to(model.device) for name in images[0].tensors}
        with torch.no_grad():
            return model.base_model.get_image_features(**tensors, return_dict=True)

    def _together(self, name: str, images: Sequence[Image]) -> Tensor:
        """Return the tensor of this name, of these images."""
        return torch.cat([image.tensors[name] for image in images], dim=self.family.along)


def rows_of(output: Any, rows: range, total: int) -> Any:
    """Return these rows of an encoder's output of ``total`` rows, in the form that models take."""

    def taken(features: Any) -> Any:
        flat = _flat(features)
        if len(flat) != total:
            raise InputError(
                f"the images have {len(flat)} rows of features, and the prompt has {total} places for them"
            )
        part = flat[rows.start : rows.stop]
        return part[None] if isinstance(features, Tensor) else [part]

    found = {"pooler_output": taken(output["pooler_output"])}
    layers = output.get("deepstack_features")
    if layers is not None:
        found["deepstack_features"] = [taken(layer) for layer in layers]
    return type(output)(**found)


def _flat(features: Any) -> Tensor:
    """Return the features of all images in one tensor, (rows, width)."""
    return torch.cat([feature.reshape(-1, feature.shape[-1]) for feature in features])


def images_in(span: Span) -> PromptImages | None:
    """Return the images of which the span computes tokens; None if it computes none."""
    media = span.media
    return media if isinstance(media, PromptImages) and media.places_in(span.start, span.end) else None


def positions_of(rows: Rows) -> Tensor:
    """Return the positions that the model is given for a pass.

    They are (rows, count), or (4, rows, count) where images have positions of their own: the plain ones, then three.
    """
    plain = rows.positions()
    every: Tensor | None = None
    for row, span in enumerate(rows.batch.spans):
        if isinstance(span.media, PromptImages) and span.media.rotary is not None:
            every = plain.expand(4, *plain.shape).clone() if every is None else every
            every[1:, row, rows.count - span.count :] = span.media.positions(span.start, span.end).to(plain.device)
    return plain if every is None else every


# ---------------------------------------------------------------- what a processor returned


def prompt_images(model: Any, tokens: Sequence[int], inputs: Mapping[str, Any]) -> PromptImages:
    """Check what a processor returned beside ``input_ids``, and tell the images apart."""
    given = {name: _copied(name, each) for name, each in inputs.items() if each is not None and name != "input_ids"}
    mask = given.pop("attention_mask", None)
    if mask is not None and not (mask.all() and mask.numel() == len(tokens)):
        raise InputError("the attention_mask of a prompt must be all ones, one for each token: leave padding out")
    config = model.config
    family = FAMILIES.get(config.model_type, NONE)
    for name in MARKS:
        if name in given and marks_nothing(model, name, given[name]):
            del given[name]
    unknown = ", ".join(str(name) for name in given if name not in {*family.names, family.types})
    if unknown:
        takes = f"takes {', '.join(family.names)}" if family.names else "is served with tokens only"
        raise InputError(
            f"the prompt has {unknown}, and a model of type {config.model_type!r} {takes}. Images are served for "
            f"{', '.join(FAMILIES)}"
        )
    if not given:
        return PromptImages((), count=len(tokens))
    missing = [name for name in (*family.names, family.types) if name and name not in given]
    if missing:
        raise InputError(f"the prompt has {', '.join(given)}, and lacks {', '.join(missing)}")
    ids = torch.tensor(tokens, dtype=torch.int64)
    are_images = ids == config.image_token_id
    marks = given.pop(family.types, None)
    if marks is not None and not torch.equal(marks.flatten().long(), are_images.long()):
        raise InputError(f"{family.types} must mark the image tokens of the prompt with 1, and all others with 0")
    for name, dimensions in family.names.items():
        if given[name].ndim != dimensions:
            raise InputError(f"{name} has {dimensions} dimensions, and here is of shape {tuple(given[name].shape)}")
    at = are_images.nonzero()[:, 0].tolist()
    runs = list(_runs(at))
    images = family.split(config, given, len(at))
    lengths = [image.tokens for image in images]
    if sum(lengths) != len(at):
        raise InputError(
            f"the prompt has {len(at)} places for images, and {len(images)} images that take {sum(lengths)}"
        )
    rotary = None
    if hasattr(model.base_model, "get_rope_index"):
        if lengths != [end - start for start, end in runs]:  # the model takes each run for one image
            raise InputError(
                "the places of an image must stand together, and other tokens between two images, since a model of "
                f"type {config.model_type!r} gives them positions by image"
            )
        rotary = _rotary(model, ids, are_images, given)
    blocks = runs if family.both_ways else []
    _check_window(model, blocks)
    return PromptImages(
        extra=_extra(images, at, blocks),
        whole=blocks,
        count=len(tokens),
        family=family,
        images=images,
        at=at,
        rotary=rotary,
    )


def marks_nothing(model: Any, name: str, marks: Tensor) -> bool:
    """Return whether an input of ``MARKS`` is the same as not given: it is 0 everywhere, and 0 means text.

    GPT-2 and models like it look token types up in their table of tokens, where 0 is a token like any other.
    """
    if marks.any():
        return False
    if name != TOKEN_TYPES or FAMILIES.get(model.config.model_type, NONE).types == name:
        return True
    if name not in inspect.signature(model.forward).parameters:
        return True
    return any(path.endswith("token_type_embeddings") for path, _ in model.named_modules())


def _copied(name: str, value: Any) -> Tensor:
    """Return a copy on the CPU. What is encoded later is what the digest is of, whatever the caller does meanwhile."""
    try:
        given = torch.as_tensor(value).detach()
        return torch.empty(given.shape, dtype=given.dtype).copy_(given)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"a prompt's {name} must be a tensor, got {shown(value)}") from error


def _extra(images: Sequence[Image], at: Sequence[int], blocks: Sequence[tuple[int, int]]) -> list[tuple[int, int, str]]:
    """Return the spans of all places, each with the digest of what its content depends on.

    That is its image or, where image tokens see each other, all images of its block.
    """
    owners = [number for number, image in enumerate(images) for _ in range(image.tokens)]
    owner = dict(zip(at, owners, strict=True))
    digests = [_digest(image) for image in images]
    return [
        (start, end, " ".join(digests[number] for number in sorted({owner[place] for place in range(start, end)})))
        for start, end in blocks or _runs(at, owners)
    ]


def _digest(image: Image) -> str:
    hashed = hashlib.blake2b(digest_size=16, person=b"loom.images")
    for name, tensor in sorted(image.tensors.items()):
        hashed.update(f" {len(name)} {name}".encode() + digest_of(tensor))
    return f"image {hashed.hexdigest()}"


def _runs(positions: Sequence[int], owners: Iterable[int] = itertools.repeat(0)) -> Iterator[tuple[int, int]]:
    """Yield the spans of consecutive positions that have one owner."""
    owned = zip(positions, owners, strict=False)
    for _, group in itertools.groupby(enumerate(owned), lambda pair: (pair[1][0] - pair[0], pair[1][1])):
        run = [position for _, (position, _) in group]
        yield run[0], run[-1] + 1


def _check_window(model: Any, blocks: list[tuple[int, int]]) -> None:
    """Refuse an image that is longer than a window.

    Its tokens see all of it, so one that goes on from inside the image would miss what the window has left behind.
    """
    window = getattr(model.config.get_text_config(decoder=True), "sliding_window", None)
    longest = max((end - start for start, end in blocks), default=0)
    if window is not None and longest > window:
        raise InputError(f"an image has {longest} tokens that see each other, and the model's window has {window}")


def _rotary(model: Any, ids: Tensor, are_images: Tensor, given: Tensors) -> Tensor:
    """Return the positions that the model itself makes of images."""
    made = model.base_model.get_rope_index
    takes = inspect.signature(made).parameters
    grids = {name: each for name, each in given.items() if name in takes}
    positions: Tensor = made(ids[None], mm_token_type_ids=are_images.long()[None], **grids)[0]
    return positions[:, 0]
