"""What the three products share: errors, config, types, lines of commands."""
