"""The modes of serving: a file each, found by the name that users type."""
