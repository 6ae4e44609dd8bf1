"""The patches of one image, made by the functions that `collate` uses."""

from isobatch.loaders.decode.pixels import empty_patches, num_rows, patch_memory, write_patches
from isobatch.models.image_tokens import plan_image


def extract_patches(rule, image, *, exact=False, images_in_sample=1):
    """The raw patches of an upright RGB image: uint8, (rows, *patch_shape(rule))."""
    plan = plan_image(rule, image.width, image.height, images_in_sample)
    patches = empty_patches(rule, num_rows(rule, plan))
    write_patches(patch_memory(rule, patches), rule, image, plan, exact=exact)
    return patches
