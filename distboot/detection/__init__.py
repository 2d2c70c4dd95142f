"""From the environment of one process to its `Placement`, and from a placement to what the frameworks read. Pure."""
