"""Plans over pools of unlike devices: uneven stages in one pipeline."""
