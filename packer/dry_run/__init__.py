"""What a build would give and take, by a drawn part of its dataset: `packer build --dry-run`."""
