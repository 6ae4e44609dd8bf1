"""What a build would give and take, by a part of it: `packer build --dry-run`."""
