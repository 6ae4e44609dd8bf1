"""Images as a processor of transformers makes them, or a user's function."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from isobatch.common.errors import ConfigError, DataError
from isobatch.loaders.batch._vision import VisionFields
from isobatch.loaders.config import LoaderConfig
from isobatch.loaders.decode.image import decode
from isobatch.loaders.decode.resize import Pixels
from isobatch.models.hf_processor import open_processor
from isobatch.models.image_rules import ProcessorRule
from isobatch.models.image_tokens import ImagePlan

JPEG_START = b"\xff\xd8"


class ProcessedFields(VisionFields):
    """What a group's images add to a `MicroBatch`, without plans.

    All images of a group go through the processor together, as those of one text do: what it pads
    is padded as its model wants it.
    """

    grids = None

    @property
    def patch_counts(self) -> list[int]:
        """A patch for each image."""
        return [1] * len(self._raw.image_sizes)

    def pixels(self) -> tuple[Tensor, Sequence[bytes | memoryview | Tensor]]:
        """No rows of pixels; `processed` is made instead, unless files are wanted as they are.

        DataError if the processor makes other numbers of tokens than were packed.
        """
        raw, rule, config = self._raw, self._rule, self._config
        _check(config)
        no_pixels = torch.empty(0, 3, 1, 1)
        if config.images == "encoded" or not isinstance(rule, ProcessorRule):
            return no_pixels, raw.images
        processor = open_processor(rule.description)
        if not raw.images:
            arrays, self.blank_tokens = processor.blank
        else:
            expected = None  # of images that are encoded for other ranks
            if len(raw.input_ids):
                expected = int(np.count_nonzero(raw.input_ids == processor.token_id))
            pictures = [_picture(self._image(number)) for number in range(len(raw.images))]
            try:
                arrays = processor.pixels(pictures, expected)
            except (ValueError, RuntimeError, DataError) as error:
                raise DataError(f"{raw.where}: {error}") from None
        self.processed = {
            name: value.to(config.pixel_dtype) if value.is_floating_point() else value
            for name, value in arrays.items()
        }
        return no_pixels, ()

    def _decoded(
        self, content: bytes | memoryview, size: tuple[int, int], target: Pixels | None
    ) -> Image.Image | Pixels:
        """The image with its one transparent colour: not every processor puts that on white.

        A JPEG has none, and goes the short way; so does what a transform takes, which is pixels.
        """
        if target is not None or bytes(content[:2]) == JPEG_START:
            return super()._decoded(content, size, target)
        return decode(content, counted=size, on_white=self._on_white, keep_colour=True)

    def _plan_all(self) -> list[ImagePlan]:
        """No plans: of some processors they take as long as an image."""
        return []


class EncodedFields(ProcessedFields):
    """What arrays of a user's function add: `processed`, each name's joined along dimension 0."""

    def pixels(self) -> tuple[Tensor, Sequence[bytes | memoryview | Tensor]]:
        """No rows of pixels. DataError for arrays that differ in more than dimension 0."""
        raw = self._raw
        owners = dict[str, list[int]]()
        if raw.sample_ids and not len(raw.input_ids):
            raise DataError("a planner gives images to other ranks, but encode= has arrays of them")
        for place, arrays in enumerate(raw.arrays or ()):
            for name in arrays:
                owners.setdefault(name, []).append(place)
        self.processed = {}
        for name, places in owners.items():
            parts = [raw.arrays[place][name] for place in places] if raw.arrays else []
            kinds = [f"{str(part.dtype)[6:]} (n, {str([*part.shape[1:]])[1:-1]})" for part in parts]
            if len(set(kinds)) > 1:
                other = next(at for at, kind in enumerate(kinds) if kind != kinds[0])
                first, second = (raw.sample_ids[places[at]] for at in (0, other))
                raise DataError(
                    f"{name} of sample {first!r} is {kinds[0]}, and of {second!r} {kinds[other]}; "
                    "arrays of a name must differ in dimension 0 only"
                )
            self.processed[name] = torch.cat(parts)
        return torch.empty(0, 3, 1, 1), ()


def _picture(image: Image.Image | Pixels) -> Image.Image:
    """A copy: the decoder writes the next image into the same memory."""
    return image.copy() if isinstance(image, Image.Image) else Image.fromarray(np.array(image))


def _check(config: LoaderConfig) -> None:
    """ConfigError for options that the processor knows nothing of."""
    reason = "the build's images go through its model's own processor"
    if config.images == "resized":
        raise ConfigError(f"images='resized': {reason}; use 'patches' or 'encoded'")
    if not config.pixel_dtype.is_floating_point:
        raise ConfigError(f"pixel_dtype=torch.uint8: {reason}, which gives no raw pixels")
    if config.reduced_decode:
        raise ConfigError(f"reduced_decode: {reason}, which must see all of them; leave it out")
